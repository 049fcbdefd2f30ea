"""The stream payloads: what comes back is what went in, and nothing else ever gets through or brings a service down."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import msgpack
import numpy as np
import pytest

from services.common.errors import EntryError
from services.common.streams.codec import MAX_LEVELS, decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import (
    EnvironmentCall,
    EpisodeOutcome,
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Turn,
    Verdict,
    VerdictStatus,
    VersionSpan,
)


def task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "job_id": "job", "lineage": 1, "group_id": 17, "attempt": 1, "purpose": Purpose.TRAIN, "prompt": (Message("user", "2 + 3 ="),),
        "data_source": "reasoning_gym:chain_sum", "ground_truth": "5", "extra_info": {"index": 3, "grid": {"cells": "ab"}},
        "group_size": 2, "temperature": 1.0, "max_tokens": 16, "min_policy_version": 4, "timeout_s": 600.0,
    }  # fmt: skip
    return Task(**(values | changes))


def rollout(text: str = " 5") -> Rollout:
    tokens, logprobs = np.arange(5, dtype="<i4"), np.linspace(-2, 0, 5, dtype="<f4")
    spans = (VersionSpan(0, 4), VersionSpan(3, 5))
    return Rollout(tokens.tobytes(), logprobs.tobytes(), text, FinishReason.STOP, spans)


def group() -> RolloutGroup:
    return RolloutGroup(task(), "rollout-1", np.arange(7, dtype="<i4").tobytes(), (rollout(), rollout(" 6 ½ ✓")), 0.25)


CALL = EnvironmentCall(
    "guess_number", {"width": 7}, seed=17, max_turns=3, max_turn_tokens=8, max_observation_tokens=64, step_timeout_s=2.0
)
TURNS = (
    Turn(0, 1, FinishReason.STOP, said=(Message("user", "2-8?"),), text="4"),
    Turn(2, 1, FinishReason.LENGTH, -0.5, (Message("tool", "higher"),), "6"),
    Turn(1, 1, FinishReason.STOP),
)
OUTCOME = EpisodeOutcome(1.0, 1.0, "guessed in turn 3")


def episode() -> Rollout:
    tokens, logprobs = np.arange(6, dtype="<i4"), np.array([-1, 0, 0, -2, 0, -3], "<f4")
    spans = (VersionSpan(0, 4), VersionSpan(3, 5))
    return Rollout(tokens.tobytes(), logprobs.tobytes(), "4 6 5", FinishReason.TURNS, spans, TURNS, OUTCOME)


def played() -> RolloutGroup:
    return replace(group(), task=task(prompt=(), environment=CALL), rollouts=(episode(), rollout()))


SCORED = Verdict(VerdictStatus.SCORED, 1.0, 1.0, "gsm8k")
TIMEOUT = Verdict(VerdictStatus.TIMEOUT, None, None, "math", "no verdict within 5 s")
"""As releases before wrote it."""
OVER_LIMIT = Verdict(VerdictStatus.TIMEOUT, -1.0, 0.0, "dapo_math", "no verdict within 5 s")


@pytest.mark.parametrize(
    "value",
    [
        task(),
        group(),
        ScoredGroup(group(), (SCORED, TIMEOUT), 0.1),
        ScoredGroup(group(), (SCORED, OVER_LIMIT), 0.1),
        task(prompt=(), environment=CALL),
        ScoredGroup(played(), (SCORED, TIMEOUT), 0.1),
    ],
    ids=["task", "group", "scored", "over limit", "task of an environment", "episodes"],
)
def test_what_goes_in_comes_out(value: Task | RolloutGroup | ScoredGroup) -> None:
    kind: Any = type(value)
    assert decode(kind, encode(value, MIN_ENTRY_BYTES), MIN_ENTRY_BYTES) == value


def test_an_entry_without_an_environment_has_the_bytes_that_releases_before_wrote_and_read() -> None:
    scored = ScoredGroup(group(), (SCORED, TIMEOUT), 0.1)
    document = asdict(scored)
    del document["group"]["task"]["environment"]
    for one in document["group"]["rollouts"]:
        del one["turns"], one["outcome"]
    before = msgpack.packb(document)
    assert encode(scored, MIN_ENTRY_BYTES) == before
    assert decode(ScoredGroup, before, MIN_ENTRY_BYTES) == scored


def test_turns_say_which_tokens_the_policy_sampled() -> None:
    assert episode().sampled.tolist() == [True, False, False, True, False, True]
    assert rollout().sampled.tolist() == [True] * 5
    assert (episode().sampled_tokens, rollout().sampled_tokens) == (3, 5)


def test_a_token_costs_eight_bytes() -> None:
    long = replace(rollout(), token_ids=bytes(4 * 10_000), inference_logprobs=bytes(4 * 10_000))
    small, large = (len(encode(replace(group(), rollouts=(one,)), MIN_ENTRY_BYTES)) for one in (rollout(), long))
    assert large - small == pytest.approx(8 * (10_000 - 5), abs=16)


def broken(path: str, value: object) -> bytes:
    document: Any = msgpack.unpackb(encode(group(), MIN_ENTRY_BYTES))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner = document
    for part in parents:
        inner = inner[part]
    inner[last] = value
    packed: bytes = msgpack.packb(document)
    return packed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("task.group_id", -1),
        ("task.group_id", 2**53),
        ("task.temperature", float("nan")),
        ("task.prompt", "2 + 3 ="),
        ("task.purpose", "play"),
        ("task.surprise", 1),
        ("task.extra_info", []),
        ("rollouts.0.finish_reason", "bored"),
        ("rollouts.1.token_ids", b"123"),
        ("rollouts.0.inference_logprobs", b""),
        ("rollouts.0.versions", []),
        ("rollouts.0.versions", [{"start": 0, "policy_version": 5}, {"start": 2, "policy_version": 4}]),
        ("rollouts.0.turns", [{"observed": 1, "sampled": 4, "finish_reason": "stop"}]),
        ("rollouts.0.turns", [{"observed": 0, "sampled": 4, "finish_reason": "stop"}]),
        ("rollouts.0.turns", [{"observed": 0, "sampled": 0, "finish_reason": "stop"}]),
        ("rollouts.0.outcome", {"reward": 1.0, "accuracy": 1.5}),
        ("rollouts.0.outcome", {"reward": float("nan"), "accuracy": 1.0}),
        ("task.environment", {"name": "guess_number"}),
        ("generate_s", float("inf")),
        ("server", None),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object) -> None:
    with pytest.raises(EntryError, match=r"not a valid RolloutGroup: ") as caught:
        decode(RolloutGroup, broken(path, value), MIN_ENTRY_BYTES)
    named = str(caught.value).removeprefix("not a valid RolloutGroup: ").partition(": ")[0]
    assert path.startswith(named) or named.startswith(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "failed", "reward": 0.0, "accuracy": 0.0},
        {"status": "scored"},
        {"status": "scored", "reward": 1.0},
        {"accuracy": 0.0},
        {"reward": 1.0, "accuracy": 1.0},
    ],
)
def test_a_reward_is_there_when_something_is_known_of_the_answer_and_only_then(wrong: dict[str, Any]) -> None:
    document = asdict(ScoredGroup(group(), (SCORED, TIMEOUT), 0.1))
    document["verdicts"] = (asdict(SCORED), asdict(TIMEOUT) | wrong)
    with pytest.raises(EntryError, match=r"verdicts\.1"):
        decode(ScoredGroup, msgpack.packb(document), MIN_ENTRY_BYTES)


def test_verdicts_and_rollouts_must_match_in_number() -> None:
    document = asdict(ScoredGroup(group(), (SCORED, TIMEOUT), 0.1)) | {"verdicts": []}
    with pytest.raises(EntryError, match="0 verdicts for 2 rollouts"):
        decode(ScoredGroup, msgpack.packb(document), MIN_ENTRY_BYTES)


def test_an_entry_beyond_the_limit_is_neither_made_nor_read() -> None:
    with pytest.raises(EntryError, match="exceeds the entry limit"):
        encode(task(ground_truth="x" * MIN_ENTRY_BYTES), MIN_ENTRY_BYTES)
    with pytest.raises(EntryError, match="exceeds the limit"):
        decode(Task, bytes(MIN_ENTRY_BYTES + 1), MIN_ENTRY_BYTES)


@pytest.mark.parametrize("value", [2**70, "\ud800", object()], ids=["a large integer", "half a character", "an object"])
def test_what_messagepack_cannot_carry_is_an_entry_error(value: object) -> None:
    with pytest.raises(EntryError, match="Task cannot be encoded"):
        encode(task(extra_info={"value": value}), MIN_ENTRY_BYTES)


def nested(levels: int) -> bytes:
    """A task whose extra_info is nested so many levels deep."""
    empty = msgpack.packb("extra_info") + msgpack.packb({})
    deep = msgpack.packb("extra_info") + b"\x81\xa1a" * levels + b"\x80"
    return encode(task(extra_info={}), MIN_ENTRY_BYTES).replace(empty, deep)


def test_nesting_within_the_limit_can_be_read_and_written_within_a_group() -> None:
    deep = replace(group(), task=decode(Task, nested(MAX_LEVELS - 1), MIN_ENTRY_BYTES))
    assert decode(RolloutGroup, encode(deep, MIN_ENTRY_BYTES), MIN_ENTRY_BYTES) == deep


def test_nesting_that_can_be_read_but_not_written_is_an_entry_error() -> None:
    read = decode(Task, nested(MAX_LEVELS), MIN_ENTRY_BYTES)
    with pytest.raises(EntryError, match="cannot be encoded: ValueError: nested deeper than 500 levels"):
        encode(read, MIN_ENTRY_BYTES)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81" * 5000, b"\x91" * 100_000, b"\x80" * 100, b"\xa2\xff\xfe",
        msgpack.packb([1, 2]), msgpack.packb(None), msgpack.packb({1: 2}),
    ],
)  # fmt: skip
def test_what_is_no_task_is_an_entry_error(payload: bytes) -> None:
    with pytest.raises(EntryError):
        decode(Task, payload, MIN_ENTRY_BYTES)


def test_mutated_entries_decode_or_are_entry_errors() -> None:
    good, rng = encode(group(), MIN_ENTRY_BYTES), random.Random(7)
    refused = 0
    for _ in range(3000):
        spoiled = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        cut = bytes(spoiled[: rng.randrange(len(spoiled))] if rng.random() < 0.3 else spoiled)
        try:
            decode(RolloutGroup, cut, MIN_ENTRY_BYTES)
        except EntryError:
            refused += 1
    assert refused > 1000
