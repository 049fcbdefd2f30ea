from __future__ import annotations

import re
from pathlib import Path

from services.common.jobs.step_record import StepRecord
from services.gateway.trackers.names import EVAL_NAMES, STEP_NAMES, figures

NOT_SHOWN = {"step", "at", "weights_digest", "record_digest", "skipped", "replayed", "optimizer_step", "groups"}


def test_every_figure_of_a_step_has_a_name_in_the_table() -> None:
    assert set(StepRecord.model_fields) - NOT_SHOWN <= set(STEP_NAMES)


def test_no_two_figures_share_a_name() -> None:
    names = [*STEP_NAMES.values(), *EVAL_NAMES.values()]
    assert len(names) == len(set(names))


def test_what_a_loss_adds_is_the_actors_and_tables_are_spread_out() -> None:
    found = figures("step", {"step": 3, "loss": 0.5, "my loss": 2, "groups": {"issued": 8, "trained": 4}})
    assert found == {"actor/loss": 0.5, "actor/my_loss": 2.0, "groups/issued": 8.0, "groups/trained": 4.0}


def test_only_finite_numbers_are_figures() -> None:
    record = {"loss": None, "entropy": float("nan"), "lr": float("inf"), "replayed": True, "skipped": "x", "reward": 1}
    assert figures("step", record) == {"rollout/reward_mean": 1.0}


def test_the_document_has_every_name() -> None:
    text = (Path(__file__).parents[4] / "docs" / "tracking.md").read_text()
    named = set(re.findall(r"`([\w]+/[\w]+)`", text))
    assert {*STEP_NAMES.values(), *EVAL_NAMES.values()} <= named
