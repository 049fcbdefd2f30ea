"""A slice of the chaos suite: in every `make test` a few kills and the faults that take seconds, in `make test-all` the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos import bombs, chunks, episodes, faults, files, hostile, models, pairs, points, rubric, training
from tests.chaos.faults import Options
from tests.chaos.grammar.cases import Case, Unrest
from tests.chaos.hostile import Paces
from tests.chaos.result import Result
from tests.chaos.stack import Stack

TYPICAL_POINTS = (
    "rank.journal.append:before", "rank.journal.append:after", "rank.consumer.ack:before", "rank.ranks.train:after",
    "rank.checkpoint.commit:before", "rollout.consumer.hop:after", "reward.consumer.hop:before",
)  # fmt: skip


QUICK_KINDS = ("kill", "point", "redis restart", "cut", "garbage")
HOSTILE_PARTS = (
    "body: aliases of aliases", "config: truncated", "data: a NaN as ground truth", "unrest: cancelled",
)  # fmt: skip


def check(result: Result) -> None:
    print(result.as_text())
    assert result.good, result.violations


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kills_of_any_process_at_random_moments_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    check(faults.kill(Options(tmp_path, target="any", count=3, seed=1)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kills_of_any_process_lose_nothing_where_engine_and_learner_take_turns(tmp_path: Path) -> None:
    check(faults.kill_in_turns(Options(tmp_path, target="any", count=4, seed=2)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_a_stack_that_was_killed_whole_left_outside_its_home_goes_at_the_next_start(tmp_path: Path) -> None:
    with Stack(tmp_path / "home") as stack:
        left = outside(stack.home)
        assert all(path.is_dir() for path in left)
        stack.kill_everything()
        assert all(path.is_dir() for path in left)
        stack.start()
        now = outside(stack.home)
        assert not any(path.exists() for path in left)
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in now)
    assert not any(path.exists() for path in now)


def outside(home: Path) -> list[Path]:
    """The directories that a stack has outside its home."""
    return [Path(name) for name in json.loads((home / "runtime.json").read_text())["folders"]]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_death_between_two_side_effects_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    check(points.points(Options(tmp_path, count=1, seed=1), TYPICAL_POINTS))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_death_between_the_optimizer_steps_of_one_training_step_leaves_no_half_of_it(tmp_path: Path) -> None:
    check(training.training(Options(tmp_path, seed=1)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_faults_at_once_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    check(pairs.pairs(Options(tmp_path, count=2, seed=1), QUICK_KINDS))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hostile_jobs_end_with_a_cause_and_hurt_nobody_else(tmp_path: Path) -> None:
    cases = [
        Case(number, f"1:{number}", (part,), Unrest.CANCEL if part.startswith("unrest") else None, 5.0)
        for number, part in enumerate(HOSTILE_PARTS)
    ]
    # Others use this machine at the same time: how fast the good job is says nothing here.
    check(hostile.hostile(Options(tmp_path, seed=1), cases, Paces(token_s=0.1, measure_s=1.0, least_share=0.0)))


def test_flipped_bits_in_a_jobs_files_are_noticed(tmp_path: Path) -> None:
    check(files.flips(Options(tmp_path, count=200, seed=1)))


def test_files_cut_short_are_never_believed(tmp_path: Path) -> None:
    check(files.cut_ends(Options(tmp_path, count=100, seed=1)))


def test_tampered_weight_chunks_never_reach_the_stage(tmp_path: Path) -> None:
    check(chunks.chunks(Options(tmp_path, count=300, seed=1)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_verifier_of_a_rubric_that_is_killed_or_stopped_loses_nothing_and_halves_no_reward(tmp_path: Path) -> None:
    check(rubric.rubric(Options(tmp_path, count=3, seed=1)))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("target", "count"), [("world", 8), ("environment", 3), ("rollout", 3)])
def test_a_death_in_mid_turn_of_episodes_loses_nothing_and_is_no_reward(
    tmp_path: Path, target: str, count: int
) -> None:
    check(episodes.kill(Options(tmp_path, target=target, count=count, seed=1), grace_s=2.0))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("target", "count"), [("world", 8), ("environment", 3), ("rollout", 3)])
def test_a_process_that_stands_still_in_mid_turn_of_episodes_costs_their_limit_and_is_no_reward(
    tmp_path: Path, target: str, count: int
) -> None:
    check(episodes.stop(Options(tmp_path, target=target, count=count, seed=1), grace_s=2.0))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hostile_environments_cost_their_own_limit_and_are_no_reward(tmp_path: Path) -> None:
    check(episodes.hostile(Options(tmp_path, count=100, seed=1), grace_s=2.0))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_verifier_bombs_cost_their_own_limit_and_nothing_of_the_others(tmp_path: Path) -> None:
    check(bombs.bombs(Options(tmp_path, count=65, seed=1), grace_s=2.0))  # others use this machine at the same time


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_judge_or_reward_model_in_trouble_loses_nothing_and_becomes_no_reward(tmp_path: Path) -> None:
    check(models.models(Options(tmp_path, count=len(models.STRIKES), seed=1), grace_s=2.0))
