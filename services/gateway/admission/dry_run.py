"""Dry run of a submission: what admission checks, and then what the job's first tasks would meet. Nothing is queued.

spec ──► admission ──► prompts as the model sees them, lengths ──► references, judged by a reward server ──► JobCheck
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from redis.asyncio import Redis

from services.common.data.record import TaskRecord
from services.common.data.references import ReferenceTrial, trial_group, trial_of
from services.common.errors import EntryError
from services.common.service.heartbeat import WorkerKind, live_workers
from services.common.spec.job import JobSpec
from services.common.streams.trial import TrialRequest, ask
from services.common.streams.types import Message, Purpose, RolloutGroup
from services.gateway.admission.admission import Admission
from services.gateway.admission.preview import Preview, ShownTask
from services.gateway.schemas import JobCheck, ReferenceCheck, SectionCheck

TRIAL_S = 10.0
"""All verdicts on references."""
_PURPOSES = {"train": Purpose.TRAIN, "eval": Purpose.EVAL}


async def dry_run(
    spec: JobSpec, admission: Admission, redis: Redis, *, response: str | None = None, missing: Sequence[str] = ()
) -> JobCheck:
    """The result for a spec whose references to hubs name commits.

    `response`: judged beside the references. `missing`: fields whose files are still to be fetched; prompts are not shown then.

    Raises SpecRefused for wrong fields, AdmissionBusy at the limit of checks.
    """
    unchecked = await admission.admit(spec, missing=missing)
    if missing:
        notes = [
            f"{field} is fetched when the job is submitted: prompts and references were not tried" for field in missing
        ]
        return JobCheck(spec=spec, unchecked=list(unchecked), sections={}, notes=notes)
    previews, notes = await admission.previews(spec)
    groups = {
        section: [trial_group(task["index"], _record(task), response, _PURPOSES[section]) for task in found["shown"]]
        for section, found in previews.items()
    }
    trials, note = await _trials(spec, groups, redis)
    sections = {section: _section(found, trials.get(section, ())) for section, found in previews.items()}
    return JobCheck(spec=spec, unchecked=list(unchecked), sections=sections, notes=[*notes, *note])


async def _trials(
    spec: JobSpec, groups: Mapping[str, Sequence[RolloutGroup]], redis: Redis
) -> tuple[dict[str, list[ReferenceTrial]], list[str]]:
    """How each section's references are judged, or a note why they are not."""
    if not any(worker.kind is WorkerKind.REWARD for worker in await live_workers(redis)):
        return {}, ["references were not judged: no reward server is running"]
    flat = tuple(group for section in groups.values() for group in section)
    request = TrialRequest(uuid.uuid4().hex, spec.reward.model_dump_json(), flat, TRIAL_S)
    try:
        reply = await ask(redis, request)
    except EntryError as error:
        return {}, [f"references were not judged: {error}"]
    if reply is None:
        return {}, [f"references were not judged: no reward server has answered within {TRIAL_S:.0f} s"]
    if reply.failure:
        return {}, [f"references were not judged: {reply.failure}"]
    verdicts = iter(reply.verdicts)
    return {name: [trial_of(group, next(verdicts)) for group in section] for name, section in groups.items()}, []


def _section(found: Preview, trials: Sequence[ReferenceTrial]) -> SectionCheck:
    references = [ReferenceCheck.model_validate(trial) for trial in trials]
    return SectionCheck.model_validate({**found, "prompts": found["shown"], "references": references})


def _record(task: ShownTask) -> TaskRecord:
    prompt = tuple(Message(role, content) for role, content in task["prompt"])
    return TaskRecord(prompt, task["data_source"], task["ground_truth"], task["extra_info"])
