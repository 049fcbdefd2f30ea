"""Deletion of ended jobs: of one, or of all beyond limits."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field
from starlette.exceptions import HTTPException

from services.common.jobs.retention import DAY_S, Policy
from services.gateway.dependencies import GUARDS, ContextDep, JobIdDep
from services.gateway.errors import SpecRefused, documented
from services.gateway.metrics import JOB_ID
from services.gateway.schemas import EXAMPLE_JOB_ID, Answer

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=GUARDS)


class PrunedJob(Answer):
    """A job that was deleted, or would be."""

    id: str = Field(description="Names the job.", examples=[EXAMPLE_JOB_ID])
    ended_at: float = Field(description="Unix seconds.", examples=[1760000000.0])
    size_bytes: int = Field(ge=0, description="What its folder took on disk.", examples=[1048576])


class Pruned(Answer):
    """What a pruning deleted."""

    dry_run: bool = Field(description="Whether nothing was deleted, and this is what would be.")
    size_bytes: int = Field(ge=0, description="What all of them took on disk.", examples=[1048576])
    jobs: list[PrunedJob] = Field(description="Oldest first.")


@router.delete(
    "/{job_id}",
    operation_id="delete_job",
    summary="Delete a job",
    status_code=204,
    response_class=Response,
    response_description="The job and its folder are gone.",
    responses=documented(404, 408, 409, 413, 422),
)
async def delete_job(context: ContextDep, job_id: JobIdDep) -> None:
    """Removes an ended job with its folder: record, history, journal, checkpoints, exports. Deleting twice is deleting once.

    409 while the job has not ended, and while a job that has not ended began, or will begin, with what is in its folder
    (`checkpoint.load`).
    """
    if not (JOB_ID.fullmatch(job_id) and await context.retention.delete(job_id)):
        raise HTTPException(404, "there is no such job")


@router.post("/prune", operation_id="prune_jobs", summary="Delete old jobs", responses=documented(408, 413, 422))
async def prune_jobs(
    context: ContextDep,
    keep: Annotated[
        int | None, Query(ge=0, le=10_000_000, description="Ended jobs to keep, the newest.", examples=[20])
    ] = None,
    older_than_days: Annotated[
        float | None, Query(ge=0, le=100_000, description="Ended jobs go that ended longer ago.", examples=[30])
    ] = None,
    max_bytes: Annotated[
        int | None,
        Query(ge=0, le=2**60, description="What the folders of ended jobs may take; the oldest go.", examples=[2**38]),
    ] = None,
    dry_run: Annotated[bool, Query(description="Only tell what would go.", examples=[True])] = False,
) -> Pruned:
    """Deletes ended jobs beyond the limits given; a job that another begins with stays, and so does every job that has not ended."""
    policy = Policy(keep, None if older_than_days is None else older_than_days * DAY_S, max_bytes)
    if policy.keeps_all:
        raise SpecRefused("say what to keep: keep, older_than_days or max_bytes", field="keep")
    gone = await context.retention.prune(policy, dry_run=dry_run)
    jobs = [PrunedJob.model_validate(job) for job in gone]
    return Pruned(dry_run=dry_run, size_bytes=sum(job.size_bytes for job in jobs), jobs=jobs)
