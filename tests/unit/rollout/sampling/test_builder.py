"""How pieces become rollouts: the stamps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.streams.types import FinishReason, VersionSpan
from services.rollout.engine.types import Piece, SamplingError
from services.rollout.sampling.builder import RolloutBuilder


def piece(tokens: list[int], version: int, finish: str | None = None) -> Piece:
    return Piece(0, tokens, [-0.5] * len(tokens), version, finish)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30))
def test_spans_say_the_version_of_every_token(steps: list[tuple[int, int]]) -> None:
    builder, version, expected = RolloutBuilder(), 0, []
    for count, newer in steps:
        version += newer
        builder.add(piece(list(range(count)), version))
        expected += [version] * count
    builder.add(piece([7], version, "stop"))
    expected.append(version)
    rollout = builder.build("")
    bounds = [*(span.start for span in rollout.versions), len(rollout.tokens)]
    found = [
        span.policy_version
        for span, end in zip(rollout.versions, bounds[1:], strict=True)
        for _ in range(span.start, end)
    ]
    assert found == expected


def test_a_version_that_sampled_nothing_leaves_no_span() -> None:
    builder = RolloutBuilder()
    builder.add(piece([1, 2], 4))
    builder.add(piece([], 5))
    builder.add(piece([3], 6, "length"))
    rollout = builder.build("abc")
    assert rollout.versions == (VersionSpan(0, 4), VersionSpan(2, 6))
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.tokens.tolist() == [1, 2, 3]
    assert rollout.logprobs.tolist() == [-0.5] * 3


def test_a_version_that_goes_back_is_an_error() -> None:
    builder = RolloutBuilder()
    builder.add(piece([1], 4))
    with pytest.raises(SamplingError, match="policy version 3 after 4"):
        builder.add(piece([2], 3))


def test_nothing_follows_the_end() -> None:
    builder = RolloutBuilder()
    builder.add(piece([1], 4, "stop"))
    with pytest.raises(SamplingError, match="went on after its end"):
        builder.add(piece([2], 4))


@pytest.mark.parametrize("finish", [None, "abort", "error"])
def test_a_rollout_that_did_not_end_by_itself_is_not_one(finish: str | None) -> None:
    builder = RolloutBuilder()
    builder.add(piece([1], 0, finish))
    with pytest.raises(SamplingError, match="ended with"):
        builder.build("")


def test_an_empty_rollout_is_an_error() -> None:
    builder = RolloutBuilder()
    builder.add(piece([], 0, "stop"))
    with pytest.raises(SamplingError, match="without a token"):
        builder.build("")


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_log_prob_that_is_not_finite_is_an_error(wrong: float) -> None:
    builder = RolloutBuilder()
    builder.add(Piece(0, [1, 2, 3], [-0.5, wrong, -0.5], 0, "stop"))
    with pytest.raises(SamplingError, match="log-prob of token 1 is not finite"):
        builder.build("")


def test_tokens_and_log_probs_must_agree_in_number() -> None:
    with pytest.raises(SamplingError, match="2 tokens came with 1 log-probs"):
        RolloutBuilder().add(Piece(0, [1, 2], [-0.5], 0, None))
