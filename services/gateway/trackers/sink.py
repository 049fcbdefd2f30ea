"""Sink: what a tracker does with a job's points, and what it knows of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.gateway.trackers.history import Point


@dataclass(frozen=True, slots=True)
class Run:
    """A job, as a tracker shows it. It travels to the child process as MessagePack.

    Example: Run("demo-3f2a9c1b", ".millrace/jobs/demo-3f2a9c1b", "millrace", "demo-3f2a9c1b", ["baseline"], {"learner": {"lr": 1e-6}}, {})
    """

    job_id: str
    folder: str
    project: str
    name: str
    tags: list[str]
    config: dict[str, Any]
    """The resolved spec, as JSON values."""
    options: dict[str, str] = field(default_factory=dict, repr=False)
    """The operator's addresses and keys: in no log and no file."""

    @property
    def tracker_folder(self) -> Path:
        """Folder below which trackers keep positions and files of their own."""
        return Path(self.folder) / "trackers"


class Sink(Protocol):
    """One tracker's client for one job. Calls come one after the other, in one process, which may be killed at any moment."""

    whole: bool
    """Whether it takes the whole history at once, after the job's end."""

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        """Sends points, in the history's order, and the end of the job, if it has ended (its state).

        Returns the tracker's own values for the position. On return the tracker has the points for good; those sent again after
        a crash replace themselves. Raises any error: then the same points come again.
        """
        ...


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The config under dotted names: `learner.lr`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": str(value)}
        )
    return found
