"""The limit of a job's entries follows from its spec, holds the largest group that the spec allows, and bounds what decoding may take."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest

from services.common.errors import EntryError
from services.common.spec.learner import EvalSpec
from services.common.spec.rollout import RolloutSpec
from services.common.streams.codec import decode, encode
from services.common.streams.limits import (
    MAX_ENTRY_BYTES,
    MAX_VALUES,
    MIN_ENTRY_BYTES,
    TASK_BYTES,
    check_values,
    entry_limit,
    needed_bytes,
)
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Verdict,
    VerdictStatus,
    VersionSpan,
)

MIB = 1024**2


def limit(group_size: int = 8, tokens: int = 512, **evaluation: Any) -> int:
    return entry_limit(RolloutSpec(group_size=group_size, rollout_max_tokens=tokens), EvalSpec(**evaluation))


def longest_group(group_size: int, tokens: int) -> ScoredGroup:
    """All that a spec of this size allows: 16 bytes of text a token, long details, eight versions, a task of 2 MiB."""
    task = Task(
        job_id="job", lineage=1, group_id=2**40, attempt=3, purpose=Purpose.TRAIN, prompt=(Message("user", "x" * 256 * 1024),),
        data_source="s" * 256, ground_truth="5", extra_info={"tests": "t" * (2 * MIB - 300 * 1024)}, group_size=group_size,
        temperature=1.0, max_tokens=tokens, min_policy_version=2**40, timeout_s=600.0,
    )  # fmt: skip
    numbers = np.zeros(tokens, "<i4").tobytes()
    spans = tuple(VersionSpan(2**20 + number, 2**40 + number) for number in range(8))
    rollout = Rollout(
        numbers, numbers, "ж" * 8 * tokens, FinishReason.LENGTH, (VersionSpan(0, 1), *spans),
    )  # fmt: skip
    group = RolloutGroup(task, "rollout-1", np.zeros(256 * 1024, "<i4").tobytes(), (rollout,) * group_size, 600.0)
    verdict = Verdict(VerdictStatus.SCORED, 1.0, 1.0, "math", "ж" * 400)
    return ScoredGroup(group, (verdict,) * group_size, 1.0)


@pytest.mark.parametrize(("group_size", "tokens"), [(2, 1), (8, 512), (16, 2048), (64, 512), (1024, 32)])
def test_ordinary_jobs_have_the_lowest_limit(group_size: int, tokens: int) -> None:
    if group_size < 1024:
        assert limit(group_size, tokens) == MIN_ENTRY_BYTES
    assert limit(group_size, tokens) < 8 * MIB


def test_long_groups_raise_it_by_what_their_tokens_take() -> None:
    assert limit(16, 32_768) == TASK_BYTES + 16 * (4096 + 32_768 * 24)
    assert 15 * MIB < limit(16, 32_768) < 16 * MIB


@pytest.mark.parametrize(("group_size", "tokens"), [(16, 8192), (4, 32_768), (64, 2048), (512, 64)])
def test_the_longest_group_of_a_spec_fits(group_size: int, tokens: int) -> None:
    scored, most = longest_group(group_size, tokens), limit(group_size, tokens)
    for value in (scored.group.task, scored.group, scored):
        payload = encode(value, most)
        assert decode(type(value), payload, most) == value


def test_samples_of_an_evaluation_count_where_there_is_one() -> None:
    assert limit(8, 32_768, samples=64) == limit(8, 32_768)
    assert limit(8, 32_768, samples=64, enabled=True) == limit(64, 32_768)
    assert limit(64, 32_768, samples=8, enabled=True) == limit(64, 32_768)


def test_a_spec_of_a_release_without_limits_gets_what_redis_can_hold() -> None:
    rollout = RolloutSpec(group_size=1024, rollout_max_tokens=1_000_000)
    assert needed_bytes(rollout, EvalSpec()) > MAX_ENTRY_BYTES
    assert entry_limit(rollout, EvalSpec()) == MAX_ENTRY_BYTES


ALL_KINDS: list[Any] = [
    None, True, 1, -1, -33, 200, 70_000, 2**33, 2**63, -200, -(2**15) - 1, -(2**40), 1.5, "", "a" * 31, "a" * 40, "a" * 300, "a" * 70_000,
    b"", b"x" * 300, b"x" * 70_000, [], [1] * 15, [1] * 20, [1] * 70_000, {}, {"a": 1}, {str(n): [n] for n in range(20)},
    {str(n): n for n in range(70_000)}, *(msgpack.ExtType(5, b"a" * n) for n in (1, 2, 3, 4, 8, 16, 300, 70_000)),
]  # fmt: skip


@pytest.mark.parametrize("single", [True, False])
def test_every_kind_of_value_is_walked_over_to_its_end(single: bool) -> None:
    for value in (*ALL_KINDS, ALL_KINDS):
        payload = msgpack.packb(value, use_single_float=single)
        check_values(payload)
        with pytest.raises(EntryError, match="ends too early"):
            check_values(payload[:-1])


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\x00\x80\x00\x00" + b"\x80" * 8 * MIB,  # an array of empty maps: 64 bytes of memory for each byte
        b"\x9f\xa2ab" * 2 * MIB,  # each array within the one before, so that none ends
        b"\xdd\xff\xff\xff\xff" * MIB,  # arrays that claim what is not there
        b"\xdf\xff\xff\xff\xff" * MIB,
    ],
    ids=["maps", "strings", "arrays", "claims"],
)
def test_a_large_entry_cannot_become_many_values(payload: bytes) -> None:
    tracemalloc.start()
    began = time.thread_time()
    with pytest.raises(EntryError, match=f"more than {MAX_VALUES} values"):
        decode(ScoredGroup, payload, 64 * MIB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB
    assert time.thread_time() - began < 20.0


def test_a_large_entry_that_is_cut_or_no_group_is_an_entry_error() -> None:
    most = limit(16, 32_768)
    payload = encode(longest_group(16, 8192), most)
    assert len(payload) > MIN_ENTRY_BYTES
    with pytest.raises(EntryError, match="ends too early"):
        decode(ScoredGroup, payload[:-1], most)
    with pytest.raises(EntryError, match="ExtraData"):
        decode(ScoredGroup, payload + b"\0", most)
    with pytest.raises(EntryError, match="not a valid RolloutGroup"):
        decode(RolloutGroup, payload, most)
    with pytest.raises(EntryError, match=f"exceeds the limit of {len(payload) - 1}"):
        decode(ScoredGroup, payload, len(payload) - 1)
