"""Text output of the commands that prove a job's work: ledger, audit and replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from millrace.records import JsonObject
from services.cli.views.jobs import print_rows
from services.common.jobs.fates import Fate
from services.common.jobs.step_record import number

if TYPE_CHECKING:
    from services.learner.audit.report import AuditReport
    from services.learner.replay.plan import Plan
    from services.learner.replay.report import ReplayReport

MAX_REASONS = 20
"""Number of reasons of failed groups that are listed."""
MAX_TENSORS = 10
"""Number of different tensors that are named."""
FIGURES = {
    "loss": "loss",
    "clip_fraction_low": "clipped low",
    "clip_fraction_high": "clipped high",
    "grad_norm": "gradient norm",
    "mismatch_kl_k3": "mismatch KL",
}
"""Figures of a step that a what-if compares, with their titles."""


def print_ledger(console: Console, ledger: JsonObject, *, listed: bool) -> None:
    """The counts, the reasons of failed groups, and the page of groups where it is requested."""
    if ledger["source"] == "record":
        remark = "no journal that the gateway can read: sums and reasons of the job's record"
        console.print(f"[yellow]remark[/yellow] {remark}")
    names = ("issued", *(fate.value for fate in Fate), "active")
    step = ("step", f"{ledger['step']}, lineage {ledger['lineage']}")
    print_rows(console, [step, *((name, ledger[name]) for name in names)])
    for reason, count in ledger["failed_reasons"].items():
        console.print(f"  {count} × {escape(reason)}")
    if listed:
        groups = ledger["groups"]
        console.print(f"{len(groups)} of {ledger['total']} groups")
        table = Table("group", "fate", "step", "reason", box=None, pad_edge=False)
        for group in groups:
            table.add_row(str(group["group_id"]), group["fate"], str(group["step"]), escape(group["reason"]))
        console.print(table)


def print_audit(console: Console, report: AuditReport) -> None:
    """The counts, then each violation with its place."""
    ended = {True: "ended", False: "not ended", None: "state unknown"}[report.ended]
    lineages = ", ".join(map(str, report.lineages)) or "none"
    rows = [
        ("job", f"{report.job_id} ({ended})"),
        ("journal", f"{report.records} records, {report.steps} steps, lineage {lineages}"),
        ("issued", report.issued),
        *((fate.value, report.fates[fate]) for fate in Fate),
        *([("given up", report.given_up)] if report.given_up else []),
        ("active", report.active),
        ("policy_age", f"at most {report.policy_age_max}; the bound is {report.max_off_policy_steps}"),
        ("checkpoints", ", ".join(map(str, report.checkpoints)) or "none"),
        ("history", f"{report.history_steps} step records compared"),
        *([("seals", f"{report.proved} of {report.records} records proved by the key")] if report.proved else []),
    ]
    print_rows(console, rows)
    for reason, count in report.failed_reasons.most_common(MAX_REASONS):
        console.print(f"  {count} × {escape(reason)}")
    for remark in report.remarks:
        console.print(f"[yellow]remark[/yellow] {escape(remark)}")
    for violation in report.violations:
        console.print(f"[red]{violation.breach}[/red] {escape(violation.where)}: {escape(violation.message)}")
    for what in report.unproved:
        console.print(f"not proved here: {escape(what)}")
    count = len(report.violations)
    console.print(f"[red]{count} violations[/red]" if count else "[green]no violation[/green]")


class ReplayPrinter:
    """A line for each version of the replay as it is computed, and the outcome."""

    def __init__(self, console: Console, plan: Plan) -> None:
        """Prints the plan's remarks and the first step."""
        self._console, self._plan = console, plan
        for remark in plan.remarks:
            console.print(f"[yellow]remark[/yellow] {escape(remark)}")
        console.print(f"replaying steps {plan.start + 1}–{plan.last} of {plan.folder.name}, from {plan.begins_with}")

    def progress(self, which: str, result: Mapping[str, Any]) -> None:
        """Prints one result of the ranks."""
        if which == "changed":
            return
        if result["kind"] == "checkpoint":
            wrong = list(map(str, result["different"]))
            outcome = f"{len(wrong)} differ: {', '.join(wrong[:MAX_TENSORS])}" if wrong else "all equal"
            verdict = _verdict(outcome, good=not wrong)
            self._console.print(f"  checkpoint {result['step']:>5}  {result['tensors']} tensors: {verdict}")
            return
        recorded = self._plan.digests.get(int(result["step"]), "")
        equal = recorded == result["digest"]
        outcome = "equal" if equal else f"recorded {recorded}" if recorded else "nothing recorded"
        verdict = _verdict(outcome, good=equal or not recorded)
        self._console.print(f"  version {result['step']:>8}  {result['digest']}  {verdict}")

    def finish(self, report: ReplayReport, differences: Mapping[str, Any]) -> None:
        """Prints the what-if, where there is one, and the verdict."""
        if report.distance is not None:
            self._print_what_if(report, differences)
        if not report.equal:
            wrong = next(version.step for version in report.versions.values() if not version.equal)
            self._console.print(f"[red]not equal, from version {wrong} on[/red]")
            return
        unproved = f"; nothing is recorded of version {', '.join(map(str, report.unproved))}" if report.unproved else ""
        self._console.print(f"[green]equal, bit for bit[/green]{unproved}")

    def _print_what_if(self, report: ReplayReport, differences: Mapping[str, Any]) -> None:
        changes = ", ".join(f"{path} = {value}" for path, value in differences.items())
        title = f"what if {escape(changes)}"
        table = Table("step", "figure", "recorded", "what if", title=title, box=None, pad_edge=False)
        for step, changed in report.changed.items():
            recorded = report.versions[step].stats or {}
            for name, label in FIGURES.items():
                if name in recorded or name in changed:
                    first = str(step) if name == "loss" else ""
                    table.add_row(first, label, number(recorded.get(name), ".6g"), number(changed.get(name), ".6g"))
        self._console.print(table)
        norms = report.distance or {}
        apart, trained, weights = norms["apart"], norms["trained"], norms["weights"]
        of_training = f", {apart / trained:.2%} of what these steps changed" if trained else ""
        self._console.print(f"weights at the end: {apart:.3e} apart, {apart / weights:.2e} of their norm{of_training}")


def _verdict(text: str, *, good: bool) -> str:
    colour = "green" if good else "red"
    return f"[{colour}]{escape(text)}[/{colour}]"
