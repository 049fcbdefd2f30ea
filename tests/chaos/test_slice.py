"""A slice of the chaos suite that runs with every `make test`: a few kills of everything, and the faults that take seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import bombs, chunks, faults, files, points
from tests.chaos.faults import Options
from tests.chaos.result import Result

TYPICAL_POINTS = (
    "rank.journal.append:before", "rank.journal.append:after", "rank.consumer.ack:before", "rank.ranks.train:after",
    "rank.checkpoint.commit:before", "rollout.consumer.hop:after", "reward.consumer.hop:before",
)  # fmt: skip


def check(result: Result) -> None:
    print(result.as_text())
    assert result.good, result.violations


@pytest.mark.timeout(240)
def test_kills_of_any_process_at_random_moments_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    check(faults.kill(Options(tmp_path, target="any", count=5, seed=1)))


@pytest.mark.timeout(240)
def test_a_death_between_two_side_effects_loses_nothing_and_trains_nothing_twice(tmp_path: Path) -> None:
    check(points.points(Options(tmp_path, count=1, seed=1), TYPICAL_POINTS))


def test_flipped_bits_in_a_jobs_files_are_noticed(tmp_path: Path) -> None:
    check(files.flips(Options(tmp_path, count=200, seed=1)))


def test_files_cut_short_are_never_believed(tmp_path: Path) -> None:
    check(files.cut_ends(Options(tmp_path, count=100, seed=1)))


def test_tampered_weight_chunks_never_reach_the_stage(tmp_path: Path) -> None:
    check(chunks.chunks(Options(tmp_path, count=300, seed=1)))


@pytest.mark.timeout(180)
def test_verifier_bombs_cost_their_own_limit_and_nothing_of_the_others(tmp_path: Path) -> None:
    check(bombs.bombs(Options(tmp_path, count=65, seed=1), grace_s=2.0))  # others use this machine at the same time
