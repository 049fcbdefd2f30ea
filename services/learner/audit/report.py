"""What an audit finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.common.jobs.fates import Fate


class Breach(StrEnum):
    """The kinds of violation."""

    DAMAGED = "damaged"
    """Something that must be there cannot be read: the audit knows nothing of what came after it."""
    TWO_FATES = "two_fates"
    TRAINED_TWICE = "trained_twice"
    NO_FATE = "no_fate"
    """The job has ended, and a group that was issued has no fate."""
    NEVER_ISSUED = "never_issued"
    """A fate of a group that was not issued by then, or fewer groups issued than before."""
    UNTRUE_FATE = "untrue_fate"
    """A record says that it trains a group that it does not hold, or holds one without saying so."""
    STEPS = "steps"
    """Steps do not follow one another."""
    LINEAGE = "lineage"
    """A lineage or policy version that falls, or a group of a lineage that was not there yet."""
    TOO_OLD = "too_old"
    """policy_age at consumption beyond the bound."""
    VERSION = "version"
    """Tokens sampled by a version that was not published yet, or older than the task asked for."""
    FOREIGN = "foreign"
    """A group of another job, or of an evaluation, or one that could not be sampled."""
    CHECKPOINT = "checkpoint"
    """A checkpoint's ledger disagrees with the journal."""
    HISTORY = "history"
    """The job's step history disagrees with the journal, or was cut or rewritten."""
    SEAL = "seal"
    """A journal record whose MAC is not of the key that was given, or that has none where it must."""
    SPEC = "spec"
    """The spec in the folder is not what a checkpoint was made of."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not be."""

    breach: Breach
    where: str
    """File, and the record or entry in it."""
    message: str


@dataclass(slots=True)
class AuditReport:
    """All that an audit found, rebuilt from the job's files."""

    job_id: str
    ended: bool | None = None
    """None: nobody says."""
    issued: int = 0
    """Ordinals issued, as far as the journal tells."""
    fates: Counter[Fate] = field(default_factory=Counter)
    failed_reasons: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    """Groups with a fate that only a checkpoint knows: their records were damaged, and are put aside."""
    records: int = 0
    steps: int = 0
    """The last step that the journal holds."""
    lineages: list[int] = field(default_factory=list)
    policy_age_max: int = 0
    max_off_policy_steps: int = 0
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints that verified."""
    history_steps: int = 0
    """Step records that were compared with the journal."""
    proved: int = 0
    """Records whose MAC is of the key that was given."""
    unproved: list[str] = field(default_factory=list)
    """What this audit cannot know, and what would prove it."""
    violations: list[Violation] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What could not be looked at, and what is odd but no violation."""

    @property
    def active(self) -> int:
        """Groups issued and without a fate."""
        return self.issued - self.fates.total() - self.given_up

    def as_record(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "job": self.job_id,
            "ok": not self.violations,
            "ended": self.ended,
            "issued": self.issued,
            "active": self.active,
            **{fate.value: self.fates[fate] for fate in Fate},
            "given_up": self.given_up,
            "failed_reasons": dict(self.failed_reasons.most_common()),
            "records": self.records,
            "steps": self.steps,
            "lineages": self.lineages,
            "policy_age_max": self.policy_age_max,
            "max_off_policy_steps": self.max_off_policy_steps,
            "checkpoints": self.checkpoints,
            "history_steps": self.history_steps,
            "proved": self.proved,
            "unproved": self.unproved,
            "violations": [{"breach": v.breach.value, "where": v.where, "message": v.message} for v in self.violations],
            "remarks": self.remarks,
        }
