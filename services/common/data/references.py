"""References as responses: a verifier is tried on the usual forms of an answer before a job depends on it.

task ──► its reference in each of FORMS, and a response of one's own ──► group ──► verdicts ──► ReferenceTrial
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.config.verifiers import BuiltIn
from services.common.data.record import TaskRecord
from services.common.streams.types import FinishReason, Purpose, Rollout, RolloutGroup, Task, Verdict, VersionSpan

FORMS: Mapping[str, str] = {
    "alone": "{}",
    "Answer: …": "Answer: {}",
    "\\boxed{…}": "\\boxed{{{}}}",
    "#### …": "#### {}",
    "<answer>…</answer>": "<answer>{}</answer>",
}
"""Name of a form → the response that states the reference so."""

_JOB = "trial"


@dataclass(frozen=True, slots=True)
class ReferenceTrial:
    """How a task's reference, and a response of one's own to the task, are judged."""

    index: int
    """Of the task in its source."""
    data_source: str
    ground_truth: str
    verifier: str
    accepted: tuple[str, ...]
    """Names of the forms in which the reference is right (accuracy 1)."""
    right: bool | None
    """Whether there is one; None where the reference is no response (tests of a program)."""
    detail: str
    """The verifier's words on the reference alone, where it is not right."""
    response: Verdict | None = None
    """Of the response of one's own."""


def trial_group(index: int, record: TaskRecord, response: str | None, purpose: Purpose) -> RolloutGroup:
    """The task with its reference in each form as a rollout, and then the response, if there is one."""
    texts = [form.format(record.ground_truth) for form in FORMS.values()] + ([] if response is None else [response])
    task = Task(
        job_id=_JOB, lineage=0, group_id=index, attempt=1, purpose=purpose, prompt=record.prompt, data_source=record.data_source,
        ground_truth=record.ground_truth, extra_info=record.extra_info, group_size=len(texts), temperature=1.0, max_tokens=1,
        min_policy_version=0, timeout_s=1.0,
    )  # fmt: skip
    rollouts = tuple(Rollout(b"", b"", text, FinishReason.STOP, (VersionSpan(0, 0),)) for text in texts)
    return RolloutGroup(task, _JOB, b"", rollouts, 0.0)


def trial_of(group: RolloutGroup, verdicts: Sequence[Verdict]) -> ReferenceTrial:
    """What the verdicts on a `trial_group` say."""
    task, forms = group.task, verdicts[: len(FORMS)]
    accepted = tuple(name for name, verdict in zip(FORMS, forms, strict=True) if verdict.accuracy == 1.0)
    right = None if forms[0].verifier == BuiltIn.CODE else bool(accepted)
    return ReferenceTrial(
        index=task.group_id,
        data_source=task.data_source,
        ground_truth=task.ground_truth,
        verifier=forms[0].verifier,
        accepted=accepted,
        right=right,
        detail="" if right else forms[0].detail,
        response=verdicts[-1] if len(verdicts) > len(FORMS) else None,
    )
