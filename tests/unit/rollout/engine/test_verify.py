"""What is in the model after a load is compared with the file, part by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.common.errors import WeightSyncError
from services.common.weights.snapshot import digest_of
from services.rollout.engine.verify import Facts, bit_sum, check_installed, read_facts

Q, K, V = "layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight", "layers.0.attn.v_proj.weight"
EMBEDDING, NORM = "embed.weight", "norm.weight"


class Model:
    """One fused parameter, a padded one and a plain one, as vLLM keeps them."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012  as the engine's models have it

    def __init__(self, file: dict[str, torch.Tensor]) -> None:
        fused = torch.cat([file[Q], file[K], file[V]])
        padded = torch.cat([file[EMBEDDING], torch.zeros(3, 4, dtype=torch.bfloat16)])
        self.parameters = {
            "layers.0.attn.qkv_proj.weight": fused,
            "embed.weight": padded,
            "norm.weight": file[NORM].clone(),
        }

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.parameters.items())


@pytest.fixture
def file() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {Q: (4, 4), K: (2, 4), V: (2, 4), EMBEDDING: (5, 4), NORM: (4,)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.fixture
def facts(file: dict[str, torch.Tensor], tmp_path: Path) -> Facts:
    save_file(file, tmp_path / "v.safetensors")
    return read_facts(tmp_path / "v.safetensors", digests(file))


def digests(file: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of(tensor.reshape(-1).view(torch.uint8).numpy()).hex() for name, tensor in file.items()}


def test_a_file_that_is_not_what_its_digests_say_is_refused_with_the_tensors_name(
    file: dict[str, torch.Tensor], facts: Facts, tmp_path: Path
) -> None:
    assert facts.keys() == file.keys()
    path, expected = tmp_path / "v.safetensors", digests(file)
    with pytest.raises(WeightSyncError, match=f"{K}: the bytes do not match their digest"):
        read_facts(path, expected | {K: expected[V]})
    with pytest.raises(WeightSyncError, match="1 tensors are not in both file and manifest: other"):
        read_facts(path, expected | {"other": expected[K]})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightSyncError, match="cannot be read"):
        read_facts(path, expected)


def test_a_whole_load_is_checked_in_every_parameter(file: dict[str, torch.Tensor], facts: Facts) -> None:
    assert check_installed(Model(file), facts, file.__getitem__) == (3, 3)


def flip(model: Model, name: str, row: int) -> None:
    bits = model.parameters[name].view(torch.int16)
    bits[row] ^= 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda model: flip(model, "layers.0.attn.qkv_proj.weight", 0), Q),
        (lambda model: flip(model, "layers.0.attn.qkv_proj.weight", 5), K),
        (lambda model: flip(model, "embed.weight", 4), EMBEDDING),
        (lambda model: model.parameters["norm.weight"].zero_(), NORM),
    ],
    ids=["q", "k", "embedding", "norm"],
)
def test_a_part_that_is_damaged_or_stale_is_named(
    file: dict[str, torch.Tensor], facts: Facts, damage: Callable[[Model], object], named: str
) -> None:
    model = Model(file)
    damage(model)
    with pytest.raises(WeightSyncError, match=named):
        check_installed(model, facts, file.__getitem__)


def test_what_the_engine_keeps_in_another_layout_is_counted_and_not_believed(
    file: dict[str, torch.Tensor], facts: Facts
) -> None:
    model = Model(file)
    model.parameters["layers.0.attn.qkv_proj.weight"] = torch.empty(0)
    model.parameters["norm.weight"] = model.parameters["norm.weight"].float()
    assert check_installed(model, facts, file.__getitem__) == (1, 3)


def test_the_right_elements_in_another_order_are_no_fault_but_not_believed_either(
    file: dict[str, torch.Tensor], facts: Facts
) -> None:
    model = Model(file)
    name = "layers.0.attn.qkv_proj.weight"
    model.parameters[name] = model.parameters[name].flip(1).contiguous()
    assert check_installed(model, facts, file.__getitem__) == (2, 3)


def test_only_what_sums_cannot_prove_is_read_again(file: dict[str, torch.Tensor], facts: Facts) -> None:
    read: list[str] = []

    def reader(name: str) -> torch.Tensor:
        read.append(name)
        return file[name]

    model = Model(file)
    check_installed(model, facts, reader)
    assert read == []
    model.parameters["layers.0.attn.qkv_proj.weight"] = model.parameters["layers.0.attn.qkv_proj.weight"].flip(1)
    model.parameters["norm.weight"] = torch.empty(0)
    check_installed(model, facts, reader)
    assert sorted(read) == sorted([Q, K, V, NORM])


def test_bits_are_summed_and_not_values() -> None:
    assert bit_sum(torch.tensor([float("nan"), -0.0])) != bit_sum(torch.tensor([float("nan"), 0.0]))
    assert bit_sum(torch.full((1001,), -1.0)) == 1001 * int(torch.tensor([-1.0]).view(torch.int32))


def test_a_slice_that_is_not_aligned_has_the_sum_of_its_copy() -> None:
    whole = torch.arange(30, dtype=torch.int16).reshape(5, 6)
    assert bit_sum(whole[1:3]) == bit_sum(whole[1:3].clone())
    assert bit_sum(whole[1:5]) == bit_sum(whole[1:5].clone())
