"""What people read."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.views.jobs import print_job, print_rollouts, print_workers
from services.common.jobs.step_record import StepRecord

STEP = {
    "step": 7, "reward": 0.4123, "accuracy": 0.4, "accept_rate": 0.637, "policy_age_mean": 0.84,
    "generated_tokens_per_s": 812.4, "trained_tokens_per_s": 640.2, "sync_s": 0.0412,
    "trained_reward": 0.5, "loss": -0.0021, "grad_norm": 1.3,
}  # fmt: skip


def test_a_step_is_one_line() -> None:
    assert StepRecord.model_validate(STEP).line(200) == (
        "step   7/200  reward 0.412  accuracy 0.400  trained 0.500  loss -0.0021  grad 1.30  accept 0.64  age 0.8"
        "  gen 812 tok/s  train 640 tok/s  sync 0.041 s"
    )


def test_what_a_step_lacks_is_a_dash() -> None:
    assert StepRecord(step=7).line().startswith("step     7  reward -  accuracy -")


def test_text_from_a_model_is_never_markup() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_rollouts(
        console, [{"group_id": 1, "prompt": "[bold]p[/bold]", "rollouts": [{"text": "[/x] [red]r", "reward": 1.0}]}]
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]p[/bold]" in text
    assert "+1.00 [/x] [red]r" in text


def test_an_episode_is_printed_turn_by_turn() -> None:
    console = Console(file=io.StringIO(), width=200)
    turns = [
        {"turn": 1, "said": [{"role": "user", "content": "37*84?"}], "text": "calc:37*84", "finish_reason": "length"},
        {"turn": 2, "said": [{"role": "tool", "content": "[b]3108"}], "text": "[/x] 3108", "reward": 0.5},
    ]
    rollout = {"text": "all of it", "reward": 1.0, "finish_reason": "stop", "tokens": 6, "turns": turns}
    group = {"group_id": 1, "prompt": "37*84?", "environment": "calculator", "environment_seed": 17}
    print_rollouts(console, [{**group, "rollouts": [rollout]}])
    lines = [line.strip() for line in console.file.getvalue().splitlines()[1:]]  # type: ignore[attr-defined]
    assert lines[:-1] == [
        "prompt 37*84?", "environment calculator, seed 17", "+1.00 2 turns", "1 policy calc:37*84", "cut off", "2 tool [b]3108",
        "2 policy [/x] 3108", "reward +0.50",
    ]  # fmt: skip
    print_rollouts(console, [{**group, "rollouts": [{**rollout, "raw": "<s>all</s>"}]}])
    assert "+1.00 <s>all</s>" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_failed_job_shows_its_cause() -> None:
    console = Console(file=io.StringIO(), width=200)
    job = {
        "id": "j",
        "state": "failed",
        "cause": "out of [memory]",
        "step": 3,
        "steps": 9,
        "policy_version": 3,
        "lineage": 1,
    }
    print_job(console, job, [{"step": 0, "avg_at_k": 0.38}], STEP)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "out of [memory]" in text
    assert "3 of 9" in text
    assert "avg_at_k 0.38" in text


def test_a_job_shows_why_its_groups_failed_before_the_first_step() -> None:
    console = Console(file=io.StringIO(), width=200)
    job = {
        "id": "j", "state": "running", "cause": "", "step": 0, "steps": 9, "policy_version": 0, "lineage": 1,
        "groups": {"issued": 9, "failed": 7}, "failure": "[red]boom", "failed_reasons": {"[red]boom": 5, "late": 2},
    }  # fmt: skip
    evals = [{"step": 0, "avg_at_k": None, "failure": "none of 8 held-out tasks could be judged"}]
    print_job(console, job, evals, None)
    rows = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["newest", "failure", "[red]boom"] in rows
    assert ["failed", "groups", "5", "×", "[red]boom"] in rows
    assert ["evaluation", "step", "0;", "none", "of", "8", "held-out", "tasks", "could", "be", "judged"] in rows


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"state": "running", "pause_requested": True}, "running (pause requested)"),
        ({"state": "paused", "pause_requested": True}, "paused"),
        ({"state": "paused", "pause_requested": False}, "paused (resume requested)"),
        ({"state": "paused", "pause_requested": True, "cancel_requested": True}, "paused (cancel requested)"),
        ({"state": "cancelled", "pause_requested": True, "cancel_requested": True}, "cancelled"),
    ],
)
def test_what_was_asked_of_a_job_and_is_not_done_yet_is_shown(record: dict[str, object], expected: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_job(console, {"id": "j", "step": 0, "steps": 1, "policy_version": 0, "lineage": 1, **record}, [], None)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split(None, 1)[1].rstrip() for line in text.splitlines() if line.startswith("state")] == [expected]


def test_a_worker_that_cannot_work_says_why() -> None:
    out = io.StringIO()
    worker = {"name": "rollout-0", "kind": "rollout", "state": "lost", "host": "node1", "pid": 0}
    cause = "ended with code 1: ValueError: Head size 16 is not supported [by] anything here, however long the line is"
    print_workers(Console(file=out, width=60), [worker | {"detail": {"trouble": cause}}])
    assert f"rollout-0: {cause}" in out.getvalue()
    assert "lost" in out.getvalue()
