"""Finding of a check, and the subject that the checks examine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.common.config.settings import Settings
from services.common.service.stack_state import UpState


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report of `millrace doctor`."""

    name: str
    """A stable word for programs: `memory`, `redis` …"""
    level: Level
    found: str
    """The state that the check found, for people."""
    remedy: str = ""
    """What to do about it; empty when all is well."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Input of every check."""

    home: Path
    settings: Settings
    state: UpState | None
    """The running stack of this home, or None."""
    url: str | None = None
    """Another gateway than this home's, or None."""


Check = Callable[[Subject], list[Finding]]


def ok(name: str, found: str) -> Finding:
    """A finding without a problem."""
    return Finding(name, Level.OK, found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """A finding that limits what works."""
    return Finding(name, Level.WARNING, found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """A finding that makes `millrace up`, or a job, fail."""
    return Finding(name, Level.PROBLEM, found, remedy)
