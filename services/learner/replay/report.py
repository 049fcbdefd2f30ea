"""Report of a replay: the versions that it proved, and the figures under a changed spec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.learner.replay.plan import Plan


@dataclass(slots=True)
class Version:
    """A policy version that was trained again."""

    step: int
    digest: str
    """Of its weights as they are published, xxh3-128."""
    recorded: str
    """The digest in the journal; empty where it has none."""
    stats: dict[str, Any] | None
    """Of its step (`StepStats.as_record`); None for the version that the replay began with."""
    tensors: int = 0
    """Tensors compared with a checkpoint of this step, over all ranks: weights, master weights, moments; 0 without one."""
    different: list[str] = field(default_factory=list)
    """Names of the tensors that differ in any bit."""

    @property
    def proved(self) -> bool:
        """Whether it equals a recorded digest or checkpoint."""
        return self.equal and bool(self.recorded or self.tensors)

    @property
    def equal(self) -> bool:
        """Whether it differs from no recorded digest or checkpoint."""
        return not self.different and self.recorded in ("", self.digest)

    def as_record(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "step": self.step,
            "digest": self.digest,
            "recorded_digest": self.recorded or None,
            "checkpoint_tensors": self.tensors,
            "different": self.different,
            "proved": self.proved,
            "stats": self.stats,
        }


@dataclass(slots=True)
class ReplayReport:
    """All results; grows while the ranks run."""

    plan: Plan
    versions: dict[int, Version] = field(default_factory=dict)
    changed: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Step → its figures under the changed spec."""
    distance: dict[str, float] | None = None
    """Norms at the end (see `compare.distances`)."""

    @property
    def equal(self) -> bool:
        """Whether every version equals its record."""
        return all(version.equal for version in self.versions.values())

    @property
    def unproved(self) -> list[int]:
        """Versions without any record to compare with."""
        return [version.step for version in self.versions.values() if version.equal and not version.proved]

    def take_recorded(self, result: dict[str, Any]) -> None:
        """Adds a result of the pass with the recorded spec."""
        step = int(result["step"])
        if result["kind"] == "version":
            digest = self.plan.digests.get(step, "")
            self.versions[step] = Version(step, str(result["digest"]), digest, result["stats"])
        elif result["kind"] == "checkpoint":
            self.versions[step].tensors = int(result["tensors"])
            self.versions[step].different = list(result["different"])

    def take_changed(self, result: dict[str, Any]) -> None:
        """Adds a result of the pass with the changed spec."""
        if result["kind"] == "distance":
            self.distance = {name: float(result[name]) for name in ("apart", "trained", "weights")}
        elif result["kind"] == "version" and result["stats"] is not None:
            self.changed[int(result["step"])] = result["stats"]

    def as_record(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "job": self.plan.folder.name,
            "from": self.plan.first,
            "to": self.plan.last,
            "begins_with": self.plan.begins_with,
            "equal": self.equal,
            "unproved": self.unproved,
            "versions": [version.as_record() for version in self.versions.values()],
            "changed": [{"step": step, "stats": stats} for step, stats in self.changed.items()],
            "distance": self.distance,
            "remarks": list(self.plan.remarks),
        }
