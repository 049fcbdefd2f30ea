"""Report of an audit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.common.jobs.fates import Fate


class Breach(StrEnum):
    """Kinds of violation."""

    DAMAGED = "damaged"
    """A required part cannot be read: the audit knows nothing of what follows it."""
    TWO_FATES = "two_fates"
    TRAINED_TWICE = "trained_twice"
    NO_FATE = "no_fate"
    """The job has ended, and a group that was issued has no fate."""
    NEVER_ISSUED = "never_issued"
    """A fate of a group that was not issued yet, or fewer groups issued than before."""
    UNTRUE_FATE = "untrue_fate"
    """A record gives the fate `trained` to a group that it does not contain, or contains one without that fate."""
    STEPS = "steps"
    """Steps are not consecutive."""
    LINEAGE = "lineage"
    """A lineage or policy version that decreases, or a group of a lineage that had not begun."""
    TOO_OLD = "too_old"
    """policy_age at consumption beyond the bound."""
    VERSION = "version"
    """Tokens sampled by a version that was not published yet, or is older than the task allows."""
    FOREIGN = "foreign"
    """A group of another job, or of an evaluation, or one that could not be sampled."""
    CHECKPOINT = "checkpoint"
    """A checkpoint's ledger disagrees with the journal."""
    HISTORY = "history"
    """The job's step history disagrees with the journal, or was cut or rewritten."""
    SEAL = "seal"
    """A journal record whose MAC is not of the given key, or that lacks a required MAC."""
    SPEC = "spec"
    """The folder's spec differs from a checkpoint's."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation."""

    breach: Breach
    where: str
    """File, and the record or entry in it."""
    message: str


@dataclass(slots=True)
class AuditReport:
    """All that an audit found, rebuilt from the job's files."""

    job_id: str
    ended: bool | None = None
    """None where it is not known."""
    issued: int = 0
    """Ordinals issued, according to the journal."""
    fates: Counter[Fate] = field(default_factory=Counter)
    failed_reasons: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    """Groups with a fate that only a checkpoint knows: their records were damaged, and removed."""
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
    """Records whose MAC is of the given key."""
    unproved: list[str] = field(default_factory=list)
    """Facts that this audit cannot prove, with what would prove them."""
    violations: list[Violation] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Parts that could not be read, and oddities that are no violations."""

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
