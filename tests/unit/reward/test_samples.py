"""Samples are for people: as many as are kept come at once, and then no more than people read. An episode is kept turn by turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.common.streams.sample_record import SampleRecord
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
from services.reward.samples import GROUP_CHARS, GROUP_TURNS, MAX_SAMPLES, SAMPLES_PER_S, SampleBudget, sample, shorten

FIRST = (Message("system", "Use the tool."), Message("user", "37*84?"))
EPISODE = (
    Turn(0, 3, FinishReason.LENGTH, 0.5, FIRST, "calc:37*84"),
    Turn(2, 1, FinishReason.STOP, None, (Message("tool", "3108"),), "3108"),
)


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(budget: SampleBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


def test_a_burst_of_as_many_as_are_kept_is_kept_whole_and_no_more() -> None:
    assert taken(SampleBudget(Clock()), 3 * MAX_SAMPLES) == MAX_SAMPLES


def test_the_right_comes_back_with_time_up_to_what_is_kept() -> None:
    clock = Clock()
    budget = SampleBudget(clock)
    taken(budget, MAX_SAMPLES)
    clock.now += 2.0
    assert taken(budget, 1000) == 2 * SAMPLES_PER_S
    clock.now += 1e6
    assert taken(budget, 1000) == MAX_SAMPLES


def test_groups_that_come_slowly_are_all_kept() -> None:
    clock = Clock()
    budget = SampleBudget(clock)
    for _ in range(5 * MAX_SAMPLES):
        clock.now += 1.0 / SAMPLES_PER_S
        assert budget.take()


def scored(*episodes: Sequence[Turn]) -> ScoredGroup:
    call = EnvironmentCall("calculator", {}, 17, 8, 16, 64, 2.0)
    task = Task("job", 1, 7, 1, Purpose.TRAIN, (), "environment:calculator", "", {}, len(episodes), 1.0, 64, 4, 60.0)
    rollouts = []
    for turns in episodes:
        tokens = bytes(4 * sum(turn.observed + turn.sampled for turn in turns))
        text = "".join(turn.text for turn in turns)
        outcome = EpisodeOutcome(1.0, 1.0, "3108 is right")
        spans = (VersionSpan(0, 4),)
        rollouts.append(Rollout(tokens, tokens, text, FinishReason.STOP, spans, tuple(turns), outcome))
    verdict = Verdict(VerdictStatus.SCORED, 1.0, 1.0, "environment", "3108 is right")
    group = RolloutGroup(replace(task, environment=call), "rollout-a", bytes(4), tuple(rollouts), 0.1)
    return ScoredGroup(group, (verdict,) * len(rollouts), 0.1)


def test_an_episode_is_kept_turn_by_turn_and_its_first_messages_are_the_prompt() -> None:
    shown = json.loads(json.dumps(sample(scored(EPISODE, EPISODE[:1]))))
    assert shown["prompt"] == "system: Use the tool.\n\nuser: 37*84?"
    assert (shown["environment"], shown["environment_seed"]) == ("calculator", 17)
    long, short = shown["rollouts"]
    assert long["turns"] == [
        {
            "turn": 1, "said": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "37*84?"}],
            "text": "calc:37*84", "observed": 0, "sampled": 3, "finish_reason": "length", "reward": 0.5,
        },
        {
            "turn": 2, "said": [{"role": "tool", "content": "3108"}], "text": "3108", "observed": 2, "sampled": 1,
            "finish_reason": "stop", "reward": None,
        },
    ]  # fmt: skip
    assert (long["detail"], len(short["turns"])) == ("3108 is right", 1)


def test_a_sample_is_as_its_record_describes_it() -> None:
    shown = sample(scored(EPISODE))
    record = SampleRecord.model_validate(shown)
    assert record.model_extra == {"prompt_token_ids": [0]}, "and is not shown"
    assert record.rollouts[0].model_extra == {"token_ids": [0] * 6}
    assert [turn.model_extra for turn in record.rollouts[0].turns] == [{}, {}]
    assert record.rollouts[0].turns[1].said[0].content == "3108"


def test_a_record_of_an_earlier_release_has_no_turns() -> None:
    record = SampleRecord.model_validate({"group_id": 7, "rollouts": [{"text": "5", "reward": 1.0}]})
    assert (record.environment, record.rollouts[0].turns) == (None, [])


def text_of(rollout: dict[str, Any]) -> int:
    said = [message["content"] for turn in rollout["turns"] for message in turn["said"]]
    return sum(map(len, (rollout["text"], *(turn["text"] for turn in rollout["turns"]), *said)))


@pytest.mark.parametrize("rollouts", [1, 32, 1024])
def test_a_sample_of_long_episodes_stays_small(rollouts: int) -> None:
    turn = Turn(1, 1, FinishReason.STOP, None, (Message("tool", "t" * 100_000),) * 40, "r" * 10_000)
    episode = (replace(turn, observed=0), *(turn,) * 31)
    shown = sample(scored(*(episode,) * rollouts))["rollouts"]
    turns = sum(len(rollout["turns"]) for rollout in shown)
    assert turns == min(32 * rollouts, GROUP_TURNS)
    assert [turn["turn"] for turn in shown[0]["turns"]][-1] == 32
    marks = 30 * (rollouts + turns * 17)
    assert sum(map(text_of, shown)) < GROUP_CHARS + marks
    assert len(json.dumps(shown)) < 2_500_000


def test_only_the_long_texts_of_an_episode_are_cut() -> None:
    long = Turn(1, 1, FinishReason.STOP, None, (Message("tool", "t" * 100_000),), "short")
    (rollout,) = sample(scored((*EPISODE, long)))["rollouts"]
    assert [turn["text"] for turn in rollout["turns"]] == ["calc:37*84", "3108", "short"]
    kept = rollout["turns"][2]["said"][0]["content"]
    assert 8_000 < len(kept) < 8_192
    assert kept.startswith("ttt")
    assert "characters…] ttt" in kept


def test_a_text_without_room_is_its_mark_alone() -> None:
    assert shorten("abc", 0) == " […3 characters…] "
