from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import xxhash

from services.common.errors import WeightSyncError
from services.common.weights.snapshot import Snapshot, TensorSpec, UInt8Array, manifest_digest


def as_bytes(tensor: torch.Tensor) -> UInt8Array:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def three_tensors() -> dict[str, tuple[str, tuple[int, ...], UInt8Array]]:
    torch.manual_seed(1)
    return {
        "model.embed.weight": ("bfloat16", (7, 3), as_bytes(torch.randn(7, 3, dtype=torch.bfloat16))),
        "model.norm.weight": ("float32", (5,), as_bytes(torch.randn(5))),
        "scale": ("float16", (), as_bytes(torch.randn(1).half())),
    }


def test_digests_are_xxh3_128_of_the_plain_bytes_in_the_given_order() -> None:
    tensors = three_tensors()
    snapshot = Snapshot.build(1, 4, tensors)
    assert [spec.name for spec in snapshot.tensors] == list(tensors)
    assert [spec.digest for spec in snapshot.tensors] == [
        xxhash.xxh3_128_digest(bytes(data)) for _, _, data in tensors.values()
    ]
    assert snapshot.total_bytes == 7 * 3 * 2 + 5 * 4 + 2
    snapshot.verify()


def test_a_snapshot_does_not_change_with_the_arrays_it_was_built_from() -> None:
    tensors = three_tensors()
    snapshot = Snapshot.build(1, 4, tensors)
    tensors["model.norm.weight"][2][:] = 0
    snapshot.verify()
    with pytest.raises(ValueError, match="read-only"):
        snapshot.data[0][0] = 1


def test_verify_names_the_tensor_whose_bytes_changed() -> None:
    snapshot = Snapshot.build(1, 4, three_tensors())
    broken = snapshot.data[1].copy()
    broken[3] ^= 1
    data = (snapshot.data[0], broken, snapshot.data[2])
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        dataclasses.replace(snapshot, data=data).verify()


def test_the_manifest_digest_depends_on_every_field_and_on_the_order() -> None:
    def spec(name: str = "a", dtype: str = "float16", shape: tuple[int, ...] = (2, 3), byte: int = 0) -> TensorSpec:
        return TensorSpec(name, dtype, shape, 12, bytes([byte] * 16))

    variants = [
        [spec(), spec("b")],
        [spec("b"), spec()],
        [spec(), spec("b", dtype="bfloat16")],
        [spec(), spec("b", shape=(3, 2))],
        [spec(), spec("b", shape=(6,))],
        [spec(), spec("b", byte=1)],
        [spec()],
        [spec("ab")],
    ]
    assert len({manifest_digest(variant) for variant in variants}) == len(variants)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "message"),
    [
        ("int8", (4,), 4, "w: dtype 'int8' does not travel"),
        ("float32", (4,), 15, r"w: 15 bytes, but float32 \(4,\) takes 16"),
        ("float32", (-1,), 4, "w: negative size"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    dtype: str, shape: tuple[int, ...], size: int, message: str
) -> None:
    with pytest.raises(WeightSyncError, match=message):
        Snapshot.build(1, 0, {"w": (dtype, shape, np.zeros(size, np.uint8))})


def test_arrays_that_are_not_bytes_and_empty_snapshots_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="w: bytes must be a uint8 array, not float32"):
        Snapshot.build(1, 0, {"w": ("float32", (2,), np.zeros(2, np.float32))})
    with pytest.raises(WeightSyncError, match="at least one tensor"):
        Snapshot.build(1, 0, {})
