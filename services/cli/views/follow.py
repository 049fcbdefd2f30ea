"""Follower of a job to its end: prints a line for each step and each evaluation; the end becomes an exit code."""

from __future__ import annotations

from rich.console import Console

from millrace.follower import StateChanged, StepTrained, follow
from millrace.gateway import GatewayClient
from millrace.records import JsonObject
from services.cli.views.progress import ProgressBoard, eval_line
from services.common.jobs.step_record import StepRecord

EXIT_CODES = {"succeeded": 0, "failed": 1, "cancelled": 3}
"""Code 2 is wrong usage, 130 an interrupt."""
INTERRUPTED = 130


def follow_job(client: GatewayClient, job: JsonObject, console: Console) -> tuple[int, JsonObject]:
    """Shows the job until it has ended; returns its exit code and last record. Ctrl-C ends the follower, not the job."""
    try:
        show_steps(client, job, console)
    except KeyboardInterrupt:
        name = job["id"]
        remark = f"no longer following; {name} goes on (`millrace show {name}`, `millrace cancel {name}`)"
        console.print(remark, markup=False)
        return INTERRUPTED, job
    ended = client.job(job["id"])
    console.print(f"{job['id']} {ended['state']}{': ' + ended['cause'] if ended['cause'] else ''}", markup=False)
    return EXIT_CODES.get(ended["state"], 1), ended


def show_steps(client: GatewayClient, job: JsonObject, console: Console) -> None:
    """Shows the job's steps and evaluations on a board as they arrive, until it has ended."""
    with ProgressBoard(console, job["steps"]) as board:
        for event in follow(client, job["id"]):
            if isinstance(event, StateChanged):
                board.record(event.record)
            elif isinstance(event, StepTrained):
                board.step(StepRecord.model_validate(event.record))
            else:
                board.say(eval_line(event.record))
