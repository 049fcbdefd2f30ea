"""Records of the gateway's JSON, typed: a job, and what its samples are chosen by."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

JsonObject = dict[str, Any]

JobState = Literal["queued", "starting", "running", "stalled", "paused", "succeeded", "failed", "cancelled"]
ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""States that a job never leaves."""


class JobRecord(TypedDict):
    """A job as the gateway gives it. Times are Unix seconds."""

    id: str
    name: str
    state: JobState
    cause: str
    """Why it is stalled, paused, failed or cancelled; empty otherwise."""
    created_at: float
    started_at: float | None
    """None while queued."""
    finished_at: float | None
    """None until it has ended."""
    learner: str | None
    lineage: int
    """Rises with every rollback of the learner."""
    step: int
    """Optimizer steps made."""
    steps: int
    """Optimizer steps to make."""
    policy_version: int
    """Newest published policy; 0 = initial weights."""
    cancel_requested: bool
    pause_requested: bool
    groups: dict[str, int]
    """Groups issued, active, and by fate."""
    failure: str
    """Why the newest failed group failed; empty while none has."""
    export: str | None
    """Folder of the newest weights in Hugging Face format, on the learner's machine."""
    tags: list[str]
    notes: str
    model: str
    """The spec's `model.path`."""
    data: str
    """The spec's `data.train.source`."""
    reward: float | None
    """Mean reward of the newest step in which rollouts were judged."""
    best_score: float | None
    """Highest avg@k of its held-out evaluations."""
    best_score_se: float | None
    """Standard error of that."""
    failed_reasons: NotRequired[dict[str, int]]
    """Failed groups by reason; a list of jobs leaves it out."""
    spec: NotRequired[JsonObject]
    """The spec with every default written out; a list of jobs leaves it out."""


class SampleFilters(TypedDict, total=False):
    """What is wanted of a job's samples; what is left out, None or False selects nothing out."""

    purpose: str | None
    """`train` or `eval`."""
    group: int | None
    """This group alone."""
    step: int | None
    """Groups sampled by the policy of this step."""
    grep: str | None
    """Rollouts with this text, in any case."""
    wrong: bool
    """Rollouts judged less than right."""
    failed: bool
    """Rollouts whose check failed: they have no reward."""
    truncated: bool
    """Rollouts that the length limit cut off."""
    raw: bool
    """With `raw_prompt` and each rollout's `raw`, as the model sees them; of at most 50 groups."""
