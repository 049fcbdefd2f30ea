"""Ledger of a job (`GET /jobs/{id}/ledger`): the fate of every group that the job issued."""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from services.common.jobs.fates import FATES_FILE, Fate, FateList, read_fates
from services.common.jobs.record import JobRecord
from services.gateway.dependencies import GUARDS, ContextDep, RecordDep
from services.gateway.errors import documented
from services.gateway.schemas import Answer

log = logging.getLogger(__name__)
router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"], responses=documented(404, 422), dependencies=GUARDS)

MAX_REASONS = 100
"""Reasons in one answer, the most frequent first."""


class LedgerSource(StrEnum):
    """Where an answer comes from."""

    JOURNAL = "journal"
    RECORD = "record"


class GroupFateAnswer(Answer):
    """How one group ended."""

    group_id: int = Field(ge=0, description="The group's ordinal within the job.", examples=[43])
    fate: Fate = Field(description="How it ended.", examples=["failed"])
    step: int = Field(
        ge=0, description="The step that trained it, or in whose journal record its end is.", examples=[7]
    )
    lineage: int = Field(ge=0, description="The lineage of that record.", examples=[1])
    reason: str = Field(description="Why; empty where the fate says it all.", examples=["a reward is not finite"])


class LedgerAnswer(Answer):
    """A job's accounts: the fates and the active groups sum to the groups issued."""

    source: LedgerSource = Field(
        description="`journal`: from the job's folder. `record`: the gateway cannot read that, or nothing was trained yet; "
        "then there are sums and reasons only, without groups."
    )
    step: int = Field(ge=0, description="The step by which this was so.", examples=[7])
    lineage: int = Field(ge=0, description="Rises with every rollback of the learner.", examples=[1])
    issued: int = Field(ge=0, description="Groups issued by then.", examples=[64])
    active: int = Field(ge=0, description="Those of them without a fate yet.", examples=[12])
    trained: int = Field(ge=0, description="Groups that a step trained.", examples=[40])
    degenerate: int = Field(ge=0, description="Groups whose rollouts were all as good: nothing to learn.", examples=[9])
    stale: int = Field(ge=0, description="Groups that came too late for the off-policy bound.", examples=[1])
    failed: int = Field(ge=0, description="Groups that could not be sampled or judged.", examples=[2])
    cancelled: int = Field(ge=0, description="Groups that the job's end cut off.", examples=[0])
    failure: str = Field(
        description="Why the newest failed group failed; empty while none has.",
        examples=["8 of 8 checks failed: ValueError: boom"],
    )
    failed_reasons: dict[str, int] = Field(
        description=f"Failed groups by reason, the {MAX_REASONS} most frequent.",
        examples=[{"a reward is not finite": 2}],
    )
    total: int = Field(ge=0, description="Groups with the fate that was asked for; those of the page are among them.")
    groups: list[GroupFateAnswer] = Field(description="A page of them, in the order in which they ended.")


@router.get("/ledger", operation_id="job_ledger", summary="What became of a job's groups")
async def job_ledger(
    context: ContextDep,
    record: RecordDep,
    fate: Annotated[Fate | None, Query(description="Only groups that ended so.", examples=["failed"])] = None,
    offset: Annotated[int, Query(ge=0, le=2**53, description="Groups to skip.", examples=[0])] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most groups to return.", examples=[100])] = 100,
) -> LedgerAnswer:
    """Every group's fate as the learner's journal has it: trained at which step, degenerate, stale, failed (why), cancelled."""
    path = context.settings.job_dir(record.id) / FATES_FILE
    found = await asyncio.to_thread(_read, path, fate, offset, limit)
    return _of_record(record) if found is None else _of_journal(found, fate, record)


def _read(path: Path, fate: Fate | None, offset: int, limit: int) -> FateList | None:
    try:
        return read_fates(path, fate=fate, offset=offset, limit=limit)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read: %s: %s", path, type(error).__name__, error)
        return None


def _of_journal(found: FateList, fate: Fate | None, record: JobRecord) -> LedgerAnswer:
    """The journal's accounts; when the live record has more fates since the same step, sums and reasons are the record's."""
    newer = sum(record.groups.get(kind, 0) for kind in Fate) > found.fates.total()
    live = newer and found.step == record.step and all(record.groups.get(kind, 0) >= found.fates[kind] for kind in Fate)
    journal = {"issued": found.issued, "active": found.active, **{kind.value: found.fates[kind] for kind in Fate}}
    return LedgerAnswer(
        source=LedgerSource.JOURNAL,
        step=found.step,
        lineage=found.lineage,
        **(_sums(record) if live else journal),
        failure=record.failure,
        failed_reasons=record.failed_reasons if live else dict(found.failed_reasons.most_common(MAX_REASONS)),
        total=found.fates.total() if fate is None else found.fates[fate],
        groups=[GroupFateAnswer.model_validate(group) for group in found.page],
    )


def _of_record(record: JobRecord) -> LedgerAnswer:
    return LedgerAnswer(
        source=LedgerSource.RECORD,
        step=record.step,
        lineage=record.lineage,
        **_sums(record),
        failure=record.failure,
        failed_reasons=record.failed_reasons,
        total=0,
        groups=[],
    )


def _sums(record: JobRecord) -> dict[str, int]:
    return {name: record.groups.get(name, 0) for name in ("issued", "active", *(kind.value for kind in Fate))}
