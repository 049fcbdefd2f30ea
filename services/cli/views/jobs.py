"""Text output about jobs, rollouts, dead letters and workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from millrace.records import ENDED, JsonObject
from services.common.jobs.step_record import StepRecord, number

SHOWN_REASONS = 5
"""Number of reasons of failed groups that are shown with a job; `millrace ledger` shows more."""


def print_jobs(console: Console, jobs: Iterable[JsonObject]) -> None:
    """One row per job."""
    rows = [
        (
            job["id"], job["state"], f"{job['step']}/{job['steps']}", number(job.get("reward"), ".3f"), _best(job),
            duration(job.get("started_at"), job.get("finished_at")) or "", job.get("model") or "",
            " ".join(job.get("tags", ())), job.get("cause") or "",
        )
        for job in jobs
    ]  # fmt: skip
    names = ("job", "state", "step", "reward", "held-out", "took", "model", "tags", "cause")
    print_table(console, names, rows, empty="no jobs yet: `millrace submit FILE`")


def _best(job: JsonObject) -> str:
    error = job.get("best_score_se")
    return f"{number(job.get('best_score'), '.3f')}{'' if error is None else f' ± {error:.3f}'}"


def print_pruned(console: Console, jobs: Iterable[JsonObject]) -> None:
    """One row per job that was deleted, or would be."""
    rows = [(job["id"], _ago(job["ended_at"]), f"{job['size_bytes'] / 2**20:,.1f} MiB") for job in jobs]
    print_table(console, ("job", "ended", "size"), rows, empty="nothing to delete")


def print_job(console: Console, job: JsonObject, evals: Sequence[JsonObject], last: JsonObject | None) -> None:
    """All of one job except its spec."""
    values = {
        "job": job["id"],
        "state": f"{job['state']}{_pending_request(job)}",
        "cause": job.get("cause"),
        "step": f"{job['step']} of {job['steps']}, policy version {job['policy_version']}, lineage {job['lineage']}",
        "learner": job.get("learner"),
        "groups": ", ".join(f"{count} {fate}" for fate, count in job.get("groups", {}).items()),
        "newest failure": job.get("failure"),
        "submitted": _ago(job.get("created_at")),
        "took": duration(job.get("started_at"), job.get("finished_at")),
        "weights": job.get("export"),
        "tags": " ".join(job.get("tags", ())),
        "notes": job.get("notes"),
        "newest step": StepRecord.model_validate(last).line() if last else None,
    }
    rows = [(name, value) for name, value in values.items() if value]
    reasons = job.get("failed_reasons", {})
    rows += [("failed groups", f"{count} × {reason}") for reason, count in list(reasons.items())[:SHOWN_REASONS]]
    for item in evals:
        numbers = {name: number(value, ".4g") for name, value in item.items() if name != "at"}
        shown = ", ".join(f"{name} {value}" for name, value in numbers.items() if value != "-")
        rows.append(("evaluation", "; ".join(filter(None, (shown, item.get("failure"))))))
    print_rows(console, rows)


def print_rollouts(console: Console, groups: Sequence[JsonObject]) -> None:
    """Groups with their prompt, and of every rollout reward and text, and below them how it was judged and what sampled it.

    An episode has its turns in place of its text: what the environment said, after the first reply, and what the policy replied.
    """
    for group in groups:
        console.rule(f"{group.get('purpose', 'train')} group {group.get('group_id')}", align="left")
        prompt = group.get("raw_prompt", group.get("prompt", ""))
        console.print(f"[bold]prompt[/bold] {escape(str(prompt))}", soft_wrap=True)
        if environment := group.get("environment"):
            console.print(f"[bold]environment[/bold] {escape(str(environment))}, seed {group.get('environment_seed')}")
        if group.get("ground_truth") or not environment:
            console.print(f"[bold]ground truth[/bold] {escape(str(group.get('ground_truth', '')))}")
        for rollout in group.get("rollouts", []):
            reward = rollout.get("reward")
            mark = rollout.get("status") if reward is None else number(reward, "+.2f")
            turns = rollout.get("turns", ()) if "raw" not in rollout else ()
            text = f"{len(turns)} turns" if turns else rollout.get("raw", rollout.get("text", ""))
            console.print(f"  [cyan]{escape(str(mark))}[/cyan] {escape(str(text))}")
            for turn in turns:
                _print_turn(console, turn)
            console.print(f"    {_judged(rollout)}", style="dim", markup=False)
    if not groups:
        console.print("no such rollouts")


def _print_turn(console: Console, turn: JsonObject) -> None:
    """The messages, except those of the first turn, which are the prompt, and the reply, each after the name of who speaks."""
    place, reward = turn.get("turn", 1), turn.get("reward")
    said = [(message["role"], message["content"]) for message in turn.get("said", ())] if place > 1 else []
    for who, text in (*said, ("policy", turn.get("text", ""))):
        console.print(f"    {place} [bold]{escape(str(who))}[/bold] {escape(str(text))}")
    about = (
        "cut off" if turn.get("finish_reason") == "length" else "",
        "" if reward is None else f"reward {number(reward, '+.2f')}",
    )
    if any(about):
        console.print(f"      {', '.join(filter(None, about))}", style="dim", markup=False)


def _judged(rollout: JsonObject) -> str:
    """How a rollout ended, what sampled it, and what its verifier says. Example: `length, 64 tokens, version 17; gsm8k: 41 is not 42`."""
    low, high = rollout.get("min_policy_version"), rollout.get("max_policy_version")
    versions = f"version {high}" if low == high else f"versions {low} to {high}"
    verdict = ": ".join(filter(None, (rollout.get("verifier"), rollout.get("detail"))))
    return "; ".join(
        filter(None, (f"{rollout.get('finish_reason')}, {rollout.get('tokens')} tokens, {versions}", verdict))
    )


def print_letters(console: Console, letters: Iterable[JsonObject]) -> None:
    """One row per dead letter; a letter whose payload was cut is marked."""
    rows = [
        (
            letter["stage"], letter["id"], letter["member"], str(letter["deliveries"]), _ago(letter["last_seen"]),
            f"{letter['size_bytes']}{'' if letter['whole'] else ' (cut)'}", letter["reason"],
        )
        for letter in letters
    ]  # fmt: skip
    names = ("stage", "entry", "group", "deliveries", "given up", "bytes", "reason")
    print_table(console, names, rows, empty="no dead letters")


def print_letter(console: Console, letter: JsonObject) -> None:
    """All of one dead letter."""
    extent = "whole" if letter["whole"] else "of which the beginning is kept: it cannot be put back"
    rows = {
        "stage": letter["stage"],
        "entry": letter["id"],
        "group": letter["member"],
        "reason": letter["reason"],
        "deliveries": f"{letter['deliveries']}, given up by {letter['consumer']}",
        "first seen": _ago(letter["first_seen"]),
        "last seen": _ago(letter["last_seen"]),
        "payload": f"{letter['size_bytes']} bytes, {extent}",
    }
    print_rows(console, rows.items())
    if letter["content"] is not None:
        console.print_json(data=letter["content"])


def print_workers(console: Console, workers: Sequence[JsonObject]) -> None:
    """One row per worker, and below the table the trouble of each that cannot work."""
    rows = [
        (
            worker["name"], worker["kind"], worker["state"], worker.get("job_id") or "",
            "" if worker.get("policy_version") is None else str(worker["policy_version"]),
            f"{worker['host']}:{worker['pid']}" if worker["pid"] else worker["host"],
        )
        for worker in workers
    ]  # fmt: skip
    print_table(console, ("worker", "kind", "state", "job", "policy", "process"), rows, empty="no workers")
    for worker in workers:
        if trouble := worker.get("detail", {}).get("trouble"):
            console.print(f"{escape(worker['name'])}: {escape(str(trouble))}", style="yellow", soft_wrap=True)


def print_rows(console: Console, rows: Iterable[tuple[str, object]]) -> None:
    """Names in bold, each with its value."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", escape(str(value)))
    console.print(table)


def print_table(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table for people, without columns that say nothing; the first names the row, and stays whole. `empty`: where it has no rows."""
    if not rows:
        console.print(empty)
        return
    table = Table(box=None, pad_edge=False)
    kept = [place for place in range(len(names)) if place == 0 or any(row[place] for row in rows)]
    for place in kept:
        table.add_column(names[place], overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(escape(row[place]) for place in kept))
    console.print(table)


def _pending_request(job: JsonObject) -> str:
    """The request that the job's learner has not fulfilled yet."""
    if job.get("cancel_requested") and job["state"] not in ENDED:
        return " (cancel requested)"
    wanted = bool(job.get("pause_requested"))
    if wanted == (job["state"] == "paused") or job["state"] in ENDED:
        return ""
    return " (pause requested)" if wanted else " (resume requested)"


def _ago(at: object) -> str:
    return f"{_span(max(0.0, time.time() - at))} ago" if isinstance(at, int | float) else ""


def duration(start: object, end: object) -> str | None:
    """Time between two moments, Unix seconds, up to now without an end; None without a start. Example: `12 min`."""
    if not isinstance(start, int | float):
        return None
    return _span((end if isinstance(end, int | float) else time.time()) - start)


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
