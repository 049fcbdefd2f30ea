"""FSDP2 beside transformers and peft: architectures without a bridge to Megatron, low-rank adapters, checkpoints of other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.learner.fsdp2_cases import ARCHITECTURES, REFUSED
from tests.integration.learner.platforms import RANKS
from tests.integration.learner.rank_runs import HERE, TIMEOUT_S, run

Said = dict[int, dict[str, Any]]
"""Ranks → what they wrote down."""
TWO_RANKS = pytest.mark.skipif(2 not in RANKS, reason="NCCL takes one rank a device")
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)  # the first test waits for the ranks


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Two ranks, then one, which loads their checkpoint."""
    root: Path = tmp_path_factory.mktemp("fsdp2")
    run([str(HERE / "trainer_reference.py"), str(root)])
    found = {}
    for ranks in (2, 1) if 2 in RANKS else (1,):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run([*launch, str(HERE / "fsdp2_ranks.py"), str(root), "fsdp2", str(ranks)])
        found[ranks] = json.loads((root / "out" / f"fsdp2-{ranks}.json").read_text())
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("way", ["shared", "joined"])
def test_logprobs_and_gradients_of_an_architecture_are_those_of_transformers(said: Said, name: str, way: str) -> None:
    """float32 rows of many sequences against float64 sequences, one at a time, with transformers' own masks."""
    found = said[1][name][way]
    assert found["logprobs"] < 5e-6
    assert found["gradients"] < 5e-6
    assert found["compared"] >= 15


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_whose_rows_would_mix_sequences_is_refused_by_name(said: Said, name: str) -> None:
    assert REFUSED[name][1] in said[1]["refused"][name]


@pytest.mark.parametrize("ranks", RANKS[:2])
class TestAdapters:
    def test_what_they_add_is_nothing_at_first(self, said: Said, ranks: int) -> None:
        assert said[ranks]["adapters"]["initial"]

    def test_training_changes_the_linear_layers_and_nothing_else(self, said: Said, ranks: int) -> None:
        changed = said[ranks]["adapters"]["changed"]
        assert len(changed) == 4 * 7
        assert all(".mlp." in name or ".self_attn." in name for name in changed)
        assert all(stats["skipped"] == "" for stats in said[ranks]["adapters"]["stats"])

    def test_save_load_continue_is_the_uninterrupted_run_bit_for_bit(self, said: Said, ranks: int) -> None:
        assert said[ranks]["adapters"]["resumed"]
        assert said[ranks]["adapters"]["digests"]

    def test_a_checkpoint_holds_adapters_alone_and_is_refused_by_a_job_without_them(
        self, said: Said, ranks: int
    ) -> None:
        found = said[ranks]["adapters"]
        assert found["bytes"] * ranks < 300_000  # the weights alone have 560,000 bytes in float32
        assert (
            "lora_A.default.weight, and the model has not (model.lora): begin from its hf/ directory" in found["whole"]
        )


@TWO_RANKS
def test_the_ranks_agree_on_what_adapters_learn(said: Said) -> None:
    one, two = said[1]["adapters"], said[2]["adapters"]
    for mine, theirs in zip(one["stats"], two["stats"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert flat(one["logprobs"]) == pytest.approx(flat(two["logprobs"]), abs=1e-4)


@pytest.mark.parametrize("way", ["merged", "adapted"])
def test_an_export_is_what_was_trained_for_transformers_and_for_peft(said: Said, way: str) -> None:
    assert flat(said[1]["peft"][way]) == pytest.approx(flat(said[1]["adapters"]["logprobs"]), abs=1e-4)
    files = said[1]["adapters"]["files"]
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_config.json", "hf/model.safetensors"} <= set(files)


@TWO_RANKS
def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_in_two(said: Said) -> None:
    one, two = said[1]["checkpoints"], said[2]["checkpoints"]
    assert one["step"] == two["step"] == 1
    assert one["next"]["loss"] == pytest.approx(two["next"]["loss"], abs=1e-5)
    assert one["next"]["grad_norm"] == pytest.approx(two["next"]["grad_norm"], rel=1e-5)


def flat(values: list[list[float]]) -> list[float]:
    return [float(value) for value in np.concatenate([np.asarray(part) for part in values])]
