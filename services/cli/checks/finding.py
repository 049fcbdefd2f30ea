"""What a check found, and what the checks are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.cli.stack.state import UpState
from services.common.config.settings import Settings


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    name: str
    """A stable word for programs: `memory`, `redis` …"""
    level: Level
    found: str
    """What is there, for people."""
    remedy: str = ""
    """What to do about it; empty when all is well."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the checks are about."""

    home: Path
    settings: Settings
    state: UpState | None
    """The stack that runs in this home, or None."""
    url: str | None = None
    """A gateway elsewhere, or None."""


Check = Callable[[Subject], list[Finding]]


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, Level.OK, found)


def warning(name: str, found: str, remedy: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(name, Level.WARNING, found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """`millrace up`, or a job, will fail."""
    return Finding(name, Level.PROBLEM, found, remedy)
