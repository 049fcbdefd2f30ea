"""Rubrics: weighted sums of verdicts, whatever the verdicts are."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec.reward import MAX_FUNCTIONS, MAX_NAMED, RubricSpec
from services.common.streams.types import RolloutGroup, Verdict, VerdictStatus
from services.reward.scorers.rubric import Rubric, Shares, combined, written_out

SCORED, TIMEOUT, FAILED = VerdictStatus


def rubric(weights: dict[str, float], accuracy_of: str | None = None) -> RubricSpec:
    return RubricSpec(verifier_function=[*weights], verifier_weight=[*weights.values()], accuracy_of=accuracy_of)


def verdict(reward: float | None, accuracy: float | None = None, status: VerdictStatus = SCORED) -> Verdict:
    return Verdict(status, reward, accuracy, "of-the-part", "because")


def shares(weights: dict[str, float], accuracy_of: str | None = None) -> Shares:
    return written_out({"r": rubric(weights, accuracy_of)})["r"]


def test_rewards_are_summed_by_their_weights_and_accuracies_are_their_mean() -> None:
    found = combined(
        "r", shares({"math": 2.0, "format": 0.5}), {"math": verdict(1.0, 1.0), "format": verdict(-1.0, 0.0)}
    )
    assert (found.status, found.reward, found.accuracy, found.verifier) == (SCORED, 1.5, 0.8, "r")
    assert found.detail == "math: 1 × 2, accuracy 1 (because); format: -1 × 0.5, accuracy 0 (because)"


def test_the_accuracy_may_be_that_of_one_function() -> None:
    parts = {"math": verdict(1.0, 1.0), "format": verdict(0.0, 0.0)}
    assert combined("r", shares({"math": 1.0, "format": 9.0}, "math"), parts).accuracy == 1.0


def test_a_part_that_failed_fails_the_whole_and_is_never_reward_0() -> None:
    found = combined(
        "r", shares({"math": 1.0, "format": 1.0}), {"math": verdict(1.0, 1.0), "format": verdict(None, None, FAILED)}
    )
    assert (found.status, found.reward, found.accuracy) == (FAILED, None, None)
    assert found.detail == "format failed: because"


def test_a_part_beyond_its_limit_leaves_its_lowest_reward_and_no_accuracy() -> None:
    found = combined(
        "r", shares({"math": 1.0, "format": 0.5}), {"math": verdict(-1.0, 0.0, TIMEOUT), "format": verdict(1.0, 1.0)}
    )
    assert (found.status, found.reward, found.accuracy) == (TIMEOUT, -0.5, 0.0)
    unknown = combined(
        "r", shares({"math": 1.0, "format": 1.0}), {"math": verdict(None, None, TIMEOUT), "format": verdict(1.0, 1.0)}
    )
    assert (unknown.status, unknown.reward, unknown.accuracy) == (TIMEOUT, None, None)


def test_a_sum_that_is_no_number_fails() -> None:
    found = combined("r", shares({"a": 1000.0, "b": 1.0}), {"a": verdict(1e308, 1.0), "b": verdict(0.0, 1.0)})
    assert (found.status, found.reward) == (FAILED, None)


def test_sums_that_are_equal_on_paper_are_equal() -> None:
    """Dynamic sampling drops a group whose accuracies are all equal: 0.1 + 0.2 must be 0.3."""
    found = shares({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4})
    both = combined("r", found, {"a": verdict(1, 1), "b": verdict(1, 1), "c": verdict(0, 0), "d": verdict(0, 0)})
    one = combined("r", found, {"a": verdict(0, 0), "b": verdict(0, 0), "c": verdict(1, 1), "d": verdict(0, 0)})
    assert (both.reward, both.accuracy) == (one.reward, one.accuracy)


@given(
    weights=st.lists(st.sampled_from([0.1, 0.2, 0.25, 1.0, 3.0]), min_size=2, max_size=5),
    bits=st.data(),
)
def test_of_right_or_wrong_parts_the_accuracies_differ_where_the_rewards_do(
    weights: list[float], bits: st.DataObject
) -> None:
    """So dynamic sampling by accuracy drops the groups that have no advantage, and no others."""
    names = [f"part{i}" for i in range(len(weights))]
    found = shares(dict(zip(names, weights, strict=True)))
    both = []
    for _ in range(2):
        right = bits.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
        both.append(combined("r", found, {n: verdict(float(r), float(r)) for n, r in zip(names, right, strict=True)}))
    assert (both[0].reward == both[1].reward) is (both[0].accuracy == pytest.approx(both[1].accuracy, abs=1e-9))


def test_a_rubric_of_rubrics_is_their_sum() -> None:
    found = written_out({"outer": rubric({"inner": 2.0, "format": 1.0}), "inner": rubric({"math": 3.0, "format": 1.0})})
    assert dict(found["outer"].reward) == {"math": 6.0, "format": 3.0}
    assert found["outer"].accuracy["math"] == pytest.approx(2 / 3 * 3 / 4)
    assert sum(found["outer"].accuracy.values()) == pytest.approx(1.0)


def test_rubrics_in_each_other_are_written_out_at_once() -> None:
    """Each names all after it: walked one by one, 2^64 paths lead to the last."""
    names = [f"r{i}" for i in range(MAX_NAMED)]
    rubrics = {
        name: rubric(dict.fromkeys([*names[i + 1 : i + MAX_FUNCTIONS], "math"], 1.0)) for i, name in enumerate(names)
    }
    assert set(written_out(rubrics)["r0"].reward) == {"math"}


class Fixed:
    """Scorer of the same verdicts for each group."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts, self.calls, self.cancelled = verdicts, 0, False

    async def score(self, group: RolloutGroup) -> list[Verdict]:  # noqa: ARG002
        self.calls += 1
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return list(self.verdicts)


class Broken:
    """Scorer behind which everything has failed."""

    async def score(self, group: RolloutGroup) -> list[Verdict]:  # noqa: ARG002
        raise ConnectionError("the pool failed")


async def test_each_rollout_has_the_sum_of_its_own_verdicts(any_group: RolloutGroup) -> None:
    parts = {"math": Fixed(verdict(1.0, 1.0), verdict(0.0, 0.0)), "format": Fixed(verdict(1.0, 1.0), verdict(1.0, 1.0))}
    found = await Rubric("r", shares({"math": 1.0, "format": 0.5}), parts).score(any_group)
    assert [each.reward for each in found] == [1.5, 0.5]
    assert [part.calls for part in parts.values()] == [1, 1]


async def test_when_one_part_breaks_no_other_goes_on(any_group: RolloutGroup) -> None:
    slow = Fixed(verdict(1.0, 1.0))
    with pytest.raises(ConnectionError):
        await Rubric("r", shares({"a": 1.0, "b": 1.0}), {"a": slow, "b": Broken()}).score(any_group)
    await asyncio.sleep(0.02)
    assert slow.cancelled


def test_every_pair_of_statuses_has_a_verdict() -> None:
    examples = [
        verdict(1.0, 1.0),
        verdict(0.0, 0.0, TIMEOUT),
        verdict(None, None, TIMEOUT),
        verdict(None, None, FAILED),
    ]
    for a, b in product(examples, examples):
        found = combined("r", shares({"a": 1.0, "b": 1.0}), {"a": a, "b": b})
        worst = max([a.status, b.status], key=[SCORED, TIMEOUT, FAILED].index)
        assert found.status is worst
