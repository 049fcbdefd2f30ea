"""Text output of a comparison of jobs."""

from __future__ import annotations

import json

from rich.console import Console

from millrace.records import JsonObject
from services.cli.views.jobs import duration, print_table
from services.cli.views.progress import score
from services.common.jobs.step_record import number


def print_comparison(console: Console, found: JsonObject) -> None:
    """A row for each job; below it a row for each setting in which they differ, with a column for each job."""
    runs = found["runs"]
    rows = [
        (
            run["id"], run["state"], f"{run['step']}/{run['steps']}", duration(run["started_at"], run["finished_at"]) or "-",
            number(run["reward"], ".3f"), score(run["best_eval"] or {}),
            str((run["best_eval"] or {}).get("step", "-")),
        )
        for run in runs
    ]  # fmt: skip
    print_table(console, ("job", "state", "step", "took", "reward", "best held-out", "at step"), rows, empty="no jobs")
    settings = [
        (item["path"], *(json.dumps(value, ensure_ascii=False) for value in item["values"]))
        for item in found["differences"]
    ]
    console.print()
    names = ("setting", *(run["id"] for run in runs))
    print_table(console, names, settings, empty="all settings are equal")
