"""Doctor of a machine (`millrace doctor`): runs all checks before anything fails, and names a remedy for each problem.

settings ─► python · cores · memory · disk · port · redis · docker · npu · packages · secrets · gateway ─► ok | warning | problem
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli.checks.finding import Check, Finding, Level, Subject, problem
from services.cli.checks.machine import check_cores, check_disk, check_docker, check_memory, check_port, check_python
from services.cli.checks.npu import check_npu
from services.cli.checks.packages import check_packages
from services.cli.checks.secrets import check_secrets
from services.cli.checks.servers import check_gateway, check_redis
from services.common.config.settings import load_settings
from services.common.errors import ConfigError
from services.common.service.stack_state import read_state

CHECKS: tuple[Check, ...] = (
    check_python, check_cores, check_memory, check_disk, check_port, check_redis, check_docker, check_npu, check_packages,
    check_secrets, check_gateway,
)  # fmt: skip
BEFORE_UP: tuple[Check, ...] = (check_memory, check_disk, check_redis, check_secrets)
"""Checks whose problems would stop the services later, or with a less clear message, after their start."""
_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


def examine(home: Path, url: str | None, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """All findings; an invalid setting is the only finding, because the checks need the settings."""
    os.environ["MILLRACE_HOME"] = str(home)
    try:
        settings = load_settings()
    except ConfigError as error:
        return [problem("settings", str(error), "correct the variable, or unset it")]
    state = read_state(home)
    subject = Subject(home, settings, state if state is not None and state.is_alive() else None, url)
    return [finding for check in checks for finding in check(subject)]


def refuse_problems(home: Path) -> None:
    """Runs the checks that `millrace up` needs. Raises ConfigError with a line for each problem and its remedy."""
    if found := [finding for finding in examine(home, None, BEFORE_UP) if finding.level is Level.PROBLEM]:
        raise ConfigError(*(f"{item.name}: {item.found}: {item.remedy}" for item in found))


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether there is no problem; warnings do not count."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings for programs."""
    return {"ok": is_well(findings), "checks": [asdict(finding) for finding in findings]}


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A row for each finding with its remedy, and the number of findings of each level."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        colour = _COLOURS[finding.level]
        text = escape(finding.found) + (f"\n[bold]→[/bold] {escape(finding.remedy)}" if finding.remedy else "")
        table.add_row(f"[{colour}]{finding.level}[/{colour}]", finding.name, text)
    console.print(table)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(", ".join(f"{count} {level}" for level, count in counts.items()))
