"""A trained episode is played again: each test has one that must not be, or that must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.common.data.environments import EnvironmentSource
from services.common.spec.job import JobSpec
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
from tests.chaos import held, played
from tests.chaos.episodes import episode_spec
from tests.chaos.held import PLACE, WAIT, Held, Stopped
from tests.chaos.scripted import lifelike, script
from tests.chaos.worlds import world
from tests.chaos.worlds.deeds import DEEDS

SPEC = JobSpec.model_validate(episode_spec())
HOSTILE = JobSpec.model_validate(episode_spec(hostile=True))
VERSION, MARK = 7, bytes(range(16))


def call_of(spec: JobSpec, group_id: int) -> EnvironmentCall:
    source = EnvironmentSource(spec.data.train)
    assert spec.environment is not None
    about = source[group_id].extra_info["environment"]
    return EnvironmentCall(about["name"], about["config"], about["seed"], **spec.environment.model_dump())


def episode(seed: int, index: int) -> tuple[Rollout, Verdict]:
    """One episode, as the services would have played it."""
    prompt = script.encode([Message("user", f"row {seed}")])
    tokens, turns, observed, said = list[int](), list[Turn](), list[int](), world.first(seed)
    while not said.done:
        tokens += observed
        row, of = (seed, index) if not turns else (lifelike.row_of([*prompt, *tokens]), 0)
        sampled = [script.token(MARK, row, of, position) for position in range(script.TOKENS)]
        tokens += sampled
        turns.append(Turn(len(observed), len(sampled), FinishReason.STOP))
        said = world.answer(seed, len(turns), script.text(sampled))
        observed = script.bridge([Message(message.role, message.content) for message in said.messages])
    assert said.reward is not None
    assert said.accuracy is not None
    data, outcome = np.array(tokens, "<i4").tobytes(), EpisodeOutcome(said.reward, said.accuracy)
    rollout = Rollout(
        data, bytes(len(data)), "", FinishReason.STOP, (VersionSpan(0, VERSION),), turns=tuple(turns), outcome=outcome
    )
    return rollout, Verdict(VerdictStatus.SCORED, said.reward, said.accuracy, "environment")


def group(spec: JobSpec = SPEC, group_id: int = 2) -> ScoredGroup:
    call = call_of(spec, group_id)
    task = Task(
        job_id="chaos", lineage=1, group_id=group_id, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source="environment:chaos",
        ground_truth="", extra_info={}, group_size=script.GROUP_SIZE, temperature=1.0, max_tokens=256, min_policy_version=VERSION,
        timeout_s=20.0, environment=call,
    )  # fmt: skip
    prompt = np.array(script.encode([Message("user", f"row {call.seed}")]), "<i4").tobytes()
    rollouts, verdicts = zip(*(episode(call.seed, index) for index in range(script.GROUP_SIZE)), strict=True)
    return ScoredGroup(RolloutGroup(task, "rollout-0", prompt, rollouts, 0.1), verdicts, 0.1)


def troubles(scored: ScoredGroup, spec: JobSpec = SPEC) -> str:
    return "\n".join(played.troubles(scored, spec, {VERSION: MARK}.get))


def changed(scored: ScoredGroup, tokens: list[int]) -> ScoredGroup:
    """With other tokens in the first rollout."""
    first, *others = scored.group.rollouts
    first = replace(first, token_ids=np.array(tokens, "<i4").tobytes())
    return replace(scored, group=replace(scored.group, rollouts=(first, *others)))


def test_sound_episodes_have_no_trouble_of_either_length() -> None:
    groups = [group(group_id=number) for number in range(20)]
    assert {len(rollout.turns) for scored in groups for rollout in scored.group.rollouts} == {2, 3}
    assert {verdict.reward for scored in groups for verdict in scored.verdicts} == {0.0, 1.0}
    assert not "".join(map(troubles, groups))


def test_the_episodes_that_are_left_of_a_group_are_sound() -> None:
    scored = group()
    left = replace(scored.group, rollouts=scored.group.rollouts[1::2])
    assert not troubles(replace(scored, group=left, verdicts=scored.verdicts[1::2]))


@pytest.mark.parametrize(("place", "said"), [(1, "the first turn"), (5, "did not say"), (-1, "turn")])
def test_a_token_that_is_not_the_episodes_is_found(place: int, said: str) -> None:
    scored = group()
    tokens = scored.group.rollouts[0].tokens.tolist()
    tokens[place] = ord("0") + (tokens[place] - ord("0") + 1) % 10
    assert said in troubles(changed(scored, tokens))


def test_a_token_of_a_version_that_nothing_tells_is_found() -> None:
    assert "is not of its versions' weights" in "\n".join(played.troubles(group(), SPEC, dict[int, bytes]().get))


def test_a_reward_that_the_world_did_not_give_is_found() -> None:
    scored = group()
    first, *others = scored.verdicts
    assert first.reward is not None
    wrong = replace(first, reward=1.0 - first.reward, accuracy=1.0 - first.reward)
    assert "and the world said" in troubles(replace(scored, verdicts=(wrong, *others)))


def test_an_episode_that_ends_early_is_found() -> None:
    scored = group()
    first, *others = scored.group.rollouts
    kept = first.turns[0].sampled
    short = replace(
        first, token_ids=first.token_ids[: 4 * kept], inference_logprobs=bytes(4 * kept), turns=first.turns[:1]
    )
    assert "is over after turn 1" in troubles(replace(scored, group=replace(scored.group, rollouts=(short, *others))))


def test_an_episode_of_another_seed_is_found() -> None:
    scored = group()
    other = replace(scored.group, task=replace(scored.group.task, group_id=3))
    assert "is not the episode of seed" in troubles(replace(scored, group=other))


def test_a_verdict_on_an_episode_whose_world_did_wrong_is_found_and_others_of_a_hostile_world_are_sound() -> None:
    seen = set()
    for number in range(8 * len(DEEDS)):
        scored = group(HOSTILE, number)
        assert scored.group.task.environment is not None
        plan = world.plan_of(scored.group.task.environment.seed)
        said = troubles(scored, HOSTILE)
        if plan is None:
            assert not said
        elif not plan.only_odd:
            assert plan.deed in said
            seen.add(plan.turn)
    assert seen == {0, 1, 2}


def test_each_deed_is_done_to_whole_groups_and_to_parts_of_them() -> None:
    plans = [world.plan_of(seed) for seed in range(4 * 3 * len(DEEDS))]
    assert {(plan.deed, plan.only_odd) for plan in plans if plan} == {
        (deed, odd) for deed in DEEDS for odd in (True, False)
    }
    assert plans.count(None) == len(plans) // 2


def held_at(began: float, ended: float, *, pid: int = 1, slot: str = PLACE, limit_s: float = 1.0) -> Held:
    return Held(slot, "step", pid, began, ended, limit_s, taken=began)


def test_what_a_stopped_process_holds_does_not_count_and_what_others_hold_meanwhile_does() -> None:
    own, others, after = held_at(10.0, 14.0), held_at(10.0, 14.0, pid=2, slot=WAIT), held_at(15.0, 16.5)
    assert list(held.beyond_limits([own, others, after], [Stopped(1, 12.0, 13.0)])) == [others, after]
    assert after.beyond_s == pytest.approx(0.5)


def test_places_of_a_dead_rollout_server_count_from_its_death() -> None:
    found = [held_at(8.0, 9.0), held_at(8.0, 10.25), held_at(10.1, 11.0), held_at(8.0, 13.0, slot=WAIT)]
    assert list(held.left_late(found, [10.0])) == [0.25]
