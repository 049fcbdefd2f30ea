"""The runs table finds and orders jobs by what people know of them; a job that lacks a figure is never before one that has it."""

from __future__ import annotations

import pytest

from services.common.jobs.record import JobRow, JobState
from services.gateway.search import JobOrder, JobSearch

NOW = 1000.0


def row(job_id: str, **changes: object) -> JobRow:
    values: dict[str, object] = {
        "id": job_id, "name": "demo", "state": JobState.SUCCEEDED, "cause": "", "created_at": 1.0, "started_at": None, "finished_at": None,
        "learner": None, "lineage": 1, "step": 0, "steps": 10, "policy_version": 0, "cancel_requested": False, "pause_requested": False,
        "groups": {}, "export": None,
    }  # fmt: skip
    return JobRow(**{**values, **changes})  # type: ignore[arg-type]


ROWS = [
    row("c-3", model="smollm2", data="gsm8k/train.jsonl", tags=["lr"], reward=0.25, step=9, started_at=10.0),
    row("b-2", model="tiny", data="reasoning_gym:chain_sum", notes="Paper's LR", reward=0.75, best_score=0.5, step=3),
    row("a-1", model="Tiny", state=JobState.FAILED, best_score=0.25, started_at=0.0, finished_at=20.0),
]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        (JobSearch(), "c-3 b-2 a-1"),
        (JobSearch(text="TINY"), "b-2 a-1"),
        (JobSearch(text="lr"), "c-3 b-2"),
        (JobSearch(text="lr chain"), "b-2"),
        (JobSearch(text="nothing"), ""),
        (JobSearch(state=JobState.FAILED), "a-1"),
        (JobSearch(tags=frozenset({"lr"}), name="c"), "c-3"),
        (JobSearch(ascending=True), "a-1 b-2 c-3"),
        (JobSearch(order=JobOrder.REWARD), "b-2 c-3 a-1"),
        (JobSearch(order=JobOrder.REWARD, ascending=True), "c-3 b-2 a-1"),
        (JobSearch(order=JobOrder.BEST_SCORE), "b-2 a-1 c-3"),
        (JobSearch(order=JobOrder.STEP), "c-3 b-2 a-1"),
        (JobSearch(order=JobOrder.RUN_TIME), "c-3 a-1 b-2"),
        (JobSearch(order=JobOrder.MODEL, ascending=True), "c-3 b-2 a-1"),
        (JobSearch(order=JobOrder.DATA, ascending=True), "c-3 b-2 a-1"),
        (JobSearch(order=JobOrder.STATE, ascending=True, text="tiny"), "a-1 b-2"),
    ],
)
def test_jobs_are_found_and_ordered(search: JobSearch, found: str) -> None:
    assert " ".join(row.id for row in search.select(ROWS, NOW)) == found
