"""Comparison of jobs: how far each is, how good, and the settings in which they differ."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from services.common.differences import MISSING, differing
from services.common.jobs.record import JobRecord
from services.gateway.dependencies import GUARDS, Context, ContextDep, find_record
from services.gateway.errors import SpecRefused, documented
from services.gateway.history import read_history
from services.gateway.schemas import EXAMPLE_JOB_ID, Comparison, JobSummary, OpenObject, Run, SettingDifference

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=GUARDS)

MAX_COMPARED = 50
"""Jobs of one comparison."""


@router.get("/compare", operation_id="compare_jobs", summary="Compare jobs", responses=documented(404, 422))
async def compare(
    context: ContextDep,
    job: Annotated[
        list[str],
        Query(
            min_length=1, max_length=MAX_COMPARED, description="Ids; repeat it for each.", examples=[[EXAMPLE_JOB_ID]]
        ),
    ],
) -> Comparison:
    """The jobs in the order given, each with its last step and its best held-out evaluation, and the settings in which they differ."""
    records = await asyncio.gather(*(find_record(context, name) for name in job))
    if len({record.id for record in records}) < len(records):
        raise SpecRefused("a job is named twice", field="job")
    specs = [record.spec.model_dump(mode="json", exclude={"name", "tags", "notes"}) for record in records]
    runs = await asyncio.gather(*(_run(context, record) for record in records))
    found = [
        SettingDifference(path=path, values=[None if value is MISSING else value for value in values])
        for path, values in differing(specs)
    ]
    return Comparison(runs=runs, differences=found)


async def _run(context: Context, record: JobRecord) -> Run:
    history = await read_history(context, record, None, 1)
    return Run(
        **JobSummary.model_validate(record).model_dump(),
        last_step=history.steps[-1] if history.steps else None,
        best_eval=max(history.evals, key=_score, default=None),
    )


def _score(evaluation: OpenObject) -> float:
    score = evaluation.get("avg_at_k")
    return score if isinstance(score, int | float) else float("-inf")
