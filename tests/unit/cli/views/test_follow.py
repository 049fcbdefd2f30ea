"""Following a job: what is shown, and how its end becomes an exit code."""

from __future__ import annotations

import io
from typing import Any, cast

import pytest
from rich.console import Console

from millrace import follower
from millrace.gateway import GatewayClient
from services.cli.views.follow import follow_job
from services.cli.views.progress import ProgressBoard
from services.common.jobs.step_record import StepRecord

JOB = {"id": "demo-1", "state": "queued", "cause": "", "step": 0, "steps": 2}
NUMBERS = (
    "reward",
    "accuracy",
    "accept_rate",
    "policy_age_mean",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "sync_s",
    "pause_s",
)
EVAL = {
    "step": 0,
    "k": 8,
    "avg_at_k": 0.5,
    "pass_at_k": 0.75,
    "tasks": 4,
    "seconds": 2.0,
    "min_policy_version": 0,
    "max_policy_version": 0,
}


class Gateway:
    """Answers as a gateway whose job makes a step, is paused, makes another and ends in `state`."""

    def __init__(self, state: str, cause: str = "", *, interrupt: bool = False) -> None:
        self.ended = JOB | {"state": state, "cause": cause, "step": 2}
        paused = JOB | {"state": "paused", "cause": "paused by request", "step": 1}
        self.records = [JOB | {"state": "running"}, paused, paused]
        self.interrupt = interrupt

    def job(self, _: str) -> dict[str, Any]:
        if not self.records and self.interrupt:
            raise KeyboardInterrupt
        return self.records.pop(0) if self.records else self.ended

    def history(self, _: str, start: int) -> dict[str, Any]:
        made: list[dict[str, Any]] = [{"step": 1, **dict.fromkeys(NUMBERS, 0.25)}]
        made += [] if self.records else [{"step": 2, **dict.fromkeys(NUMBERS, None)}]
        return {"steps": [step for step in made if step["step"] >= start], "evals": [EVAL]}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.0)


def follow(gateway: Gateway) -> tuple[int, dict[str, Any], list[str]]:
    console = Console(file=io.StringIO(), width=200)
    code, record = follow_job(cast("GatewayClient", gateway), JOB, console)
    return code, record, cast("io.StringIO", console.file).getvalue().splitlines()


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 3)])
def test_the_jobs_end_is_the_exit_code(state: str, code: int) -> None:
    found, record, lines = follow(Gateway(state, "why" if code else ""))
    assert (found, record["state"]) == (code, state)
    assert lines[-1] == f"demo-1 {state}{': why' if code else ''}"


def test_each_step_and_evaluation_is_a_line_under_headings_once() -> None:
    _, _, lines = follow(Gateway("succeeded"))
    assert lines[0].split()[:3] == ["step", "reward", "accuracy"]
    assert [text.split()[0] for text in lines if text.split()[0] in {"1", "2"}] == ["1", "2"]
    assert len([text for text in lines if "held-out evaluation" in text]) == 1


def test_a_state_with_a_cause_is_told_once() -> None:
    _, _, lines = follow(Gateway("succeeded"))
    assert [text.strip() for text in lines if "paused" in text] == ["the job is paused: paused by request"]


def test_an_interrupt_ends_the_following_and_says_that_the_job_goes_on() -> None:
    code, record, lines = follow(Gateway("succeeded", interrupt=True))
    assert (code, record) == (130, JOB)
    assert "demo-1 goes on" in lines[-1]


def test_on_a_terminal_a_bar_shows_state_and_progress() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with ProgressBoard(console, 4) as board:
        board.record(JOB | {"state": "running", "step": 1})
        board.step(StepRecord.model_validate({"step": 2, **dict.fromkeys(NUMBERS, 0.5)}))
        board._progress.refresh()
    text = cast("io.StringIO", console.file).getvalue()
    assert "running" in text
    assert "2/4" in text
