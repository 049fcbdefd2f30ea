"""Job record: states, fields, and its forms in Redis and in the job's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self in ENDED


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
LIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STALLED, JobState.PAUSED})
"""States in which a learner may own the job: it does if the record names one."""
PAUSED_CAUSE = "paused by request"

_OPTIONAL = frozenset(
    {"failure", "failed_reasons", "tags", "notes", "model", "data", "reward", "best_score", "best_score_se"}
)
"""Fields that a record in a job's folder may lack: an earlier release wrote it."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as lists show it: its record without the spec, which is large and slow to parse."""

    id: str
    name: str
    state: JobState
    cause: str
    """Why it is stalled, paused, failed or cancelled; empty otherwise."""
    created_at: float
    """Unix seconds."""
    started_at: float | None
    finished_at: float | None
    learner: str | None
    lineage: int
    step: int
    steps: int
    policy_version: int
    cancel_requested: bool
    pause_requested: bool
    groups: dict[str, int]
    """Groups issued, active, and by fate."""
    export: str | None
    """Directory of the newest weights in Hugging Face format."""
    failure: str = field(default="", kw_only=True)
    """Why the newest failed group failed; empty while none has."""
    tags: list[str] = field(default_factory=list, kw_only=True)
    """Labels: those of the spec until somebody changes them."""
    notes: str = field(default="", kw_only=True)
    """A remark for people: that of the spec until somebody changes it."""
    model: str = field(default="", kw_only=True)
    """The spec's `model.path`; empty in the row of an earlier release's record."""
    data: str = field(default="", kw_only=True)
    """The spec's `data.train.source`, likewise."""
    reward: float | None = field(default=None, kw_only=True)
    """Mean reward of the newest step in which rollouts were judged."""
    best_score: float | None = field(default=None, kw_only=True)
    """Highest avg@k of its held-out evaluations."""
    best_score_se: float | None = field(default=None, kw_only=True)
    """Standard error of that."""


@dataclass(frozen=True, slots=True)
class JobRecord(JobRow):
    """All that is known of a job."""

    spec: JobSpec
    order: int = 0
    """Place among all jobs, by submission."""
    incarnation: int = 0
    """Number of starts of the job's head; 0 in a restored record until a head begins."""
    failed_reasons: dict[str, int] = field(default_factory=dict)
    """Failed groups by reason: the most frequent reasons."""
    idempotency: str = ""
    """Redis key of its Idempotency-Key, a space, and the digest of the spec sent with it; empty without one."""


ROW_FIELDS = tuple(item.name for item in fields(JobRow) if item.name != "id")
"""Fields of the record's hash that a row needs."""
RECORD_FIELDS = tuple(item.name for item in fields(JobRecord))


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A running job, as rollout and reward servers need it to attach."""

    job_id: str
    lineage: int
    weights_address: str
    """host:port of the learner's gRPC."""
    policy_version: int
    model_path: str
    """Directory of the model, the same on every machine."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The job spec as JSON values."""


def from_hash(job_id: str, raw: Mapping[str, str]) -> JobRecord:
    """The record in a Redis hash."""
    return JobRecord(
        **_row_values(job_id, raw),
        spec=JobSpec.model_validate_json(raw["spec"], context=RECORDED),
        order=int(raw.get("order", 0)),
        incarnation=int(raw.get("incarnation", 0)),
        failed_reasons=json.loads(raw.get("failed_reasons", "{}")),
        idempotency=raw.get("idempotency", ""),
    )


def row_from_hash(job_id: str, raw: Mapping[str, str]) -> JobRow:
    """The row in a record's hash; `ROW_FIELDS` of it are enough."""
    return JobRow(**_row_values(job_id, raw))


def _row_values(job_id: str, raw: Mapping[str, str]) -> dict[str, Any]:
    def number(name: str) -> float | None:
        return float(raw[name]) if raw.get(name) else None

    return {
        "id": job_id,
        "name": raw["name"],
        "state": JobState(raw["state"]),
        "cause": raw.get("cause", ""),
        "created_at": float(raw["created_at"]),
        "started_at": number("started_at"),
        "finished_at": number("finished_at"),
        "learner": raw.get("learner"),
        "lineage": int(raw.get("lineage", 0)),
        "step": int(raw.get("step", 0)),
        "steps": int(raw["steps"]),
        "policy_version": int(raw.get("policy_version", 0)),
        "cancel_requested": raw.get("cancel_requested") == "1",
        "pause_requested": raw.get("pause_requested") == "1",
        "groups": json.loads(raw.get("groups", "{}")),
        "export": raw.get("export") or None,
        "failure": raw.get("failure", ""),
        "tags": json.loads(raw.get("tags", "[]")),
        "notes": raw.get("notes", ""),
        "model": raw.get("model", ""),
        "data": raw.get("data", ""),
        "reward": number("reward"),
        "best_score": number("best_score"),
        "best_score_se": number("best_score_se"),
    }


def to_hash(record: JobRecord) -> dict[str, str]:
    """The hash that `from_hash` reads, without the id and the incarnation."""
    values = {name: value for name, value in asdict(record).items() if name not in {"id", "incarnation", "spec"}}
    flags = {name: "1" if value else "" for name, value in values.items() if isinstance(value, bool)}
    plain = {name: str(value) for name, value in values.items() if value is not None and name not in flags}
    tables = {name: json.dumps(getattr(record, name)) for name in ("groups", "failed_reasons", "tags")}
    return plain | flags | tables | {"spec": record.spec.model_dump_json()}


def to_document(record: JobRecord) -> dict[str, Any]:
    """The record as JSON values, without its spec: the content of `job.json`."""
    return {name: getattr(record, name) for name in RECORD_FIELDS if name != "spec"}


def from_document(document: Mapping[str, Any], spec: JobSpec) -> JobRecord:
    """The record in a document of `to_document`, perhaps an old one. Raises KeyError, TypeError or ValueError."""
    names = [name for name in RECORD_FIELDS if name != "spec" and (name in document or name not in _OPTIONAL)]
    values = {name: document[name] for name in names}
    return JobRecord(**values | {"state": JobState(values["state"]), "spec": spec})
