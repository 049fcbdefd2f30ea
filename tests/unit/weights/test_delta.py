from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.common.errors import WeightSyncError
from services.common.weights import delta
from services.common.weights.snapshot import UInt8Array, digest_of

same_size_pairs = st.integers(0, 3000).flatmap(
    lambda size: st.tuples(hnp.arrays(np.uint8, size), hnp.arrays(np.uint8, size))
)


@given(same_size_pairs)
def test_decoding_an_encoded_delta_gives_the_same_bytes(pair: tuple[UInt8Array, UInt8Array]) -> None:
    data, base = pair
    encoded = delta.encode(data, base)
    np.testing.assert_array_equal(delta.decode(encoded, base), data)
    assert len(encoded) <= delta.largest_delta(data.nbytes)


@given(same_size_pairs, st.data())
def test_another_base_gives_bytes_with_another_digest(pair: tuple[UInt8Array, UInt8Array], draw: st.DataObject) -> None:
    data, base = pair
    if not data.size:
        return
    position = draw.draw(st.integers(0, data.size - 1))
    other = base.copy()
    other[position] ^= draw.draw(st.integers(1, 255))
    assert digest_of(delta.decode(delta.encode(data, base), other)) != digest_of(data)


@given(same_size_pairs, st.data())
def test_a_changed_byte_raises_or_shows_in_the_digest(pair: tuple[UInt8Array, UInt8Array], draw: st.DataObject) -> None:
    data, base = pair
    encoded = bytearray(delta.encode(data, base))
    position = draw.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= draw.draw(st.integers(1, 255))
    try:
        decoded = delta.decode(encoded, base)
    except WeightSyncError:
        return
    # A bit of the frame's header may not matter; then the bytes must be the right ones.
    assert (digest_of(decoded) == digest_of(data)) == np.array_equal(decoded, data)


@given(st.binary(max_size=200), st.integers(0, 100))
def test_arbitrary_bytes_raise_only_weight_sync_errors(wire: bytes, size: int) -> None:
    base = np.zeros(size, np.uint8)
    try:
        decoded = delta.decode(wire, base)
    except WeightSyncError:
        return
    assert decoded.nbytes == size


def test_truncated_and_extended_deltas_are_refused() -> None:
    rng = np.random.default_rng(0)
    data, base = rng.integers(0, 256, 5000, np.uint8), rng.integers(0, 256, 5000, np.uint8)
    encoded = delta.encode(data, base)
    for wire in (encoded[:-1], encoded[: len(encoded) // 2], encoded + b"x", b""):
        with pytest.raises(WeightSyncError, match="delta"):
            delta.decode(wire, base)


def test_sizes_that_differ_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(WeightSyncError, match="4 and 5 bytes"):
        delta.encode(np.zeros(5, np.uint8), np.zeros(4, np.uint8))
    bomb = zstandard.compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(WeightSyncError, match="67108864 bytes, its base has 10"):
        delta.decode(bomb, np.zeros(10, np.uint8))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    with pytest.raises(WeightSyncError, match="its base has 10"):
        delta.decode(streamed, np.zeros(10, np.uint8))
