"""What the ranks train is what was sampled, weighed by advantages over the rollouts that were judged."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from services.common.spec.job import JobSpec
from services.common.streams.types import FinishReason, Turn
from services.learner.groups.batch import Batch, assemble
from services.learner.groups.buffer import Judged
from tests.unit.learner.scored_groups import PROMPT, job_spec, judged_group, over_limit


def advantages(spec: JobSpec, rewards: list[float | None], lengths: list[int]) -> list[float]:
    """Advantage of each sequence of a lone group, checked to be the same at each of its tokens."""
    sequences = assemble([judged_group(3, rewards, lengths=lengths)], spec)
    assert all(len(set(sequence.advantage.tolist())) == 1 for sequence in sequences)
    return [float(sequence.advantage[0]) for sequence in sequences]


def grpo(rewards: list[float]) -> list[float]:
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
    return [(reward - mean) / spread for reward in rewards]


def test_a_sequence_is_the_prompt_and_the_response_with_the_engines_logprobs() -> None:
    (first, second) = assemble([judged_group(5, [1.0, 0.0], lengths=[3, 2])], job_spec())
    assert first.tokens.tolist() == [*PROMPT, 100, 101, 102]
    assert second.tokens.tolist() == [*PROMPT, 100, 101]
    assert first.prompt_len == second.prompt_len == len(PROMPT)
    assert first.inference_logprobs.tolist() == [-0.125, -0.25, -0.375]
    assert first.loss_mask.tolist() == [True, True, True]
    assert (first.group_id, second.group_id) == (5, 5)
    assert first.tokens.dtype == np.int32
    assert first.advantage.dtype == np.float32


def test_sequences_keep_the_order_of_the_groups_and_of_their_rollouts() -> None:
    groups = [judged_group(9, [1.0, 0.0], lengths=[1, 2]), judged_group(4, [0.0, 1.0], lengths=[3, 4])]
    sequences = assemble(groups, job_spec())
    assert [(s.group_id, s.response_len) for s in sequences] == [(9, 1), (9, 2), (4, 3), (4, 4)]


def test_the_advantage_is_the_estimators_within_the_group() -> None:
    assert advantages(job_spec(), [1.0, 0.0, 0.0, 0.5], [2] * 4) == pytest.approx(grpo([1.0, 0.0, 0.0, 0.5]), rel=1e-5)
    rloo = job_spec(algorithm={"advantage_estimator": "rloo"})
    assert advantages(rloo, [1.0, 0.0, 0.0], [2] * 3) == pytest.approx([1.0, -0.5, -0.5])


def test_an_estimator_that_scales_by_the_batch_sees_every_group() -> None:
    groups = [judged_group(0, [1.0, 0.0], lengths=[1, 3]), judged_group(1, [4.0, 0.0], lengths=[2, 2])]
    spec = job_spec(algorithm={"advantage_estimator": "reinforce_plus_plus_baseline"})
    tokens = [0.5] + [-0.5] * 3 + [2.0] * 2 + [-2.0] * 2
    mean, spread = statistics.fmean(tokens), statistics.stdev(tokens)
    expected = [(value - mean) / spread for value in (0.5, -0.5, 2.0, -2.0)]
    assert [float(s.advantage[0]) for s in assemble(groups, spec)] == pytest.approx(expected, rel=1e-5)


def test_a_job_of_the_first_revision_is_assembled_as_it_was() -> None:
    groups = [judged_group(0, [1.0, 0.0], lengths=[1, 3]), judged_group(1, [4.0, 0.0], lengths=[2, 2])]
    spec = job_spec(algorithm={"advantage_estimator": "reinforce_plus_plus_baseline", "revision": 1})
    spread = statistics.stdev([0.5, -0.5, 2.0, -2.0])
    expected = [value / spread for value in (0.5, -0.5, 2.0, -2.0)]
    assert [float(s.advantage[0]) for s in assemble(groups, spec)] == pytest.approx(expected, rel=1e-5)


def test_a_rollout_that_could_not_be_judged_is_left_out_of_baseline_and_batch() -> None:
    assert advantages(job_spec(), [1.0, None, 0.0, 0.0], [1, 2, 3, 4]) == pytest.approx(grpo([1.0, 0.0, 0.0]), rel=1e-5)
    sequences = assemble([judged_group(0, [1.0, None, 0.0, 0.0], lengths=[1, 2, 3, 4])], job_spec())
    assert [s.response_len for s in sequences] == [1, 3, 4]


def test_a_check_beyond_its_limit_is_trained_as_the_worst_answer() -> None:
    group = over_limit(judged_group(0, [1.0, None, 0.0], lengths=[1, 2, 3]), reward=-1.0)
    sequences = assemble([group], job_spec())
    assert [s.response_len for s in sequences] == [1, 2, 3]
    assert [float(s.advantage[0]) for s in sequences] == pytest.approx(grpo([1.0, -1.0, 0.0]), rel=1e-5)


def test_an_empty_response_is_not_trained_but_its_reward_counts_in_the_baseline() -> None:
    assert advantages(job_spec(), [1.0, 0.0, 0.0], [2, 0, 3]) == pytest.approx(
        [grpo([1.0, 0.0, 0.0])[0], grpo([1.0, 0.0, 0.0])[2]], rel=1e-5
    )


def test_the_overlong_punishment_falls_on_rewards_before_the_advantage() -> None:
    spec = job_spec(
        rollout={"rollout_max_tokens": 10},
        algorithm={"overlong_buffer_enable": True, "overlong_buffer": 4, "overlong_buffer_penalty_factor": 0.5},
    )
    shaped = [1.0, 1.0 - 0.125, 0.0 - 0.5, 0.0]  # 6 = L − B loses nothing, 7 a quarter of the factor, 10 all of it
    assert advantages(spec, [1.0, 1.0, 0.0, 0.0], [6, 7, 10, 2]) == pytest.approx(grpo(shaped), rel=1e-5)


def test_without_the_overlong_switch_length_costs_nothing() -> None:
    spec = job_spec(rollout={"rollout_max_tokens": 10}, algorithm={"overlong_buffer": 4})
    assert advantages(spec, [1.0, 0.0], [10, 10]) == pytest.approx(grpo([1.0, 0.0]), rel=1e-5)


def episodes(group: Judged, *turns: tuple[Turn, ...]) -> Judged:
    """The group, its rollouts as episodes of these turns."""
    rollouts = tuple(replace(one, turns=own) for one, own in zip(group.scored.group.rollouts, turns, strict=True))
    return replace(group, scored=replace(group.scored, group=replace(group.scored.group, rollouts=rollouts)))


TWO_TURNS = (Turn(0, 2, FinishReason.STOP), Turn(3, 1, FinishReason.STOP))
ONE_TURN = (Turn(0, 6, FinishReason.STOP),)


def test_what_an_episode_observed_is_computed_and_not_trained() -> None:
    group = episodes(judged_group(5, [1.0, 0.0], lengths=[6, 6]), TWO_TURNS, ONE_TURN)
    first, second = assemble([group], job_spec())
    assert first.tokens.tolist() == [*PROMPT, 100, 101, 102, 103, 104, 105]
    assert first.loss_mask.tolist() == [True, True, False, False, False, True]
    assert second.loss_mask.all()


def test_tokens_are_counted_that_were_sampled_in_rollouts_that_could_be_judged() -> None:
    group = episodes(judged_group(5, [1.0, None], lengths=[6, 6]), TWO_TURNS, ONE_TURN)
    other = judged_group(6, [1.0, 0.0, None], lengths=[4, 0, 9])
    assert (
        Batch.of([group, other], job_spec(algorithm={"advantage_estimator": "reinforce_plus_plus"})).sampled_tokens == 7
    )


def test_turns_are_counted_of_episodes_alone() -> None:
    group, other = judged_group(5, [1.0, 0.0], lengths=[6, 6]), judged_group(6, [1.0, 0.0])
    assert Batch.of([group, other], job_spec()).turns_mean is None
    assert Batch.of([episodes(group, TWO_TURNS, ONE_TURN), other], job_spec()).turns_mean == 1.5


def test_a_turn_is_credited_with_the_rewards_from_it_on() -> None:
    first = (Turn(0, 2, FinishReason.STOP, 0.5), Turn(1, 1, FinishReason.STOP))
    group = episodes(judged_group(5, [1.0, 0.0], lengths=[4, 6]), first, ONE_TURN)
    of_turns = np.array([0.5, 1.0, 0.0])  # of the group's three turns
    scaled = (of_turns - of_turns.mean()) / (of_turns.std(ddof=1) + 1e-6)
    one, other = assemble([group], job_spec(algorithm={"turn_credit": "turn"}))
    assert one.advantage == pytest.approx([scaled[0] + scaled[1]] * 2 + [scaled[1]] * 2, rel=1e-6)
    assert other.advantage == pytest.approx([scaled[2]] * 6, rel=1e-6)


def test_without_turns_the_credit_of_a_turn_is_that_of_the_trajectory() -> None:
    group = judged_group(5, [1.0, 0.0, 0.5], lengths=[4, 6, 2])
    whole, by_turn = (assemble([group], job_spec(algorithm={"turn_credit": way})) for way in ("trajectory", "turn"))
    assert [each.advantage.tolist() for each in whole] == [each.advantage.tolist() for each in by_turn]


def test_the_length_that_is_punished_is_what_was_sampled() -> None:
    spec = job_spec(
        rollout={"rollout_max_tokens": 6},
        algorithm={"overlong_buffer_enable": True, "overlong_buffer": 2, "overlong_buffer_penalty_factor": 1.0},
    )
    group = episodes(judged_group(5, [1.0, 1.0], lengths=[6, 6]), TWO_TURNS, ONE_TURN)
    first, second = assemble([group], spec)
    assert (first.reward, second.reward) == (1.0, 0.0)


def test_an_episode_that_was_cut_is_left_out_where_cut_ones_are() -> None:
    group = episodes(judged_group(5, [1.0, 0.0], lengths=[6, 6]), TWO_TURNS, ONE_TURN)
    for reason, counts in ((FinishReason.CONTEXT, False), (FinishReason.LENGTH, False), (FinishReason.TURNS, True)):
        cut = replace(group.scored.group.rollouts[0], finish_reason=reason)
        rollouts = (cut, *group.scored.group.rollouts[1:])
        changed = replace(group, scored=replace(group.scored, group=replace(group.scored.group, rollouts=rollouts)))
        first, _ = assemble([changed], job_spec(algorithm={"mask_truncated": True}))
        assert bool(first.loss_mask.any()) is counts
