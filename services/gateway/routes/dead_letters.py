"""Dead letters: entries of a job's streams that could not be used; they are read here, and requeued."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any

import msgpack
from fastapi import APIRouter, Path, Query
from starlette.exceptions import HTTPException

from services.common.redis.keys import Stage
from services.common.streams import dead_letters
from services.common.streams.dead_letters import DeadLetter
from services.gateway.dependencies import GUARDS, Context, ContextDep, RecordDep
from services.gateway.errors import documented
from services.gateway.events.stream import EVENT_ID_PATTERN
from services.gateway.schemas import DeadLetterContent, DeadLetterInfo, DeadLetters, OpenObject, Requeued

router = APIRouter(prefix="/jobs/{job_id}/dead-letters", tags=["dead letters"], dependencies=GUARDS)

SHOWN_BYTES = 64 * 1024
"""Of a payload, in an answer; a larger payload is not decoded."""
SHOWN_DEPTH = 20
LETTER_ID = re.compile(EVENT_ID_PATTERN)

StageDep = Annotated[Stage, Path(description="The stream that the entry was on.", examples=[Stage.ROLLOUTS])]
EXAMPLE_ID = "1760000000000-0"
EntryDep = Annotated[
    str,
    Path(description="The dead letter's id.", examples=[EXAMPLE_ID], json_schema_extra={"pattern": EVENT_ID_PATTERN}),
]
"""The pattern is documented, not enforced: every other id is answered with 404."""


@router.get("", operation_id="list_dead_letters", summary="A job's dead letters", responses=documented(404, 422))
async def list_dead_letters(
    context: ContextDep,
    record: RecordDep,
    stage: Annotated[Stage | None, Query(description="Of this stage only.", examples=[Stage.ROLLOUTS])] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most letters to return of a stage.", examples=[20])] = 100,
    before: Annotated[
        str | None,
        Query(
            pattern=EVENT_ID_PATTERN,
            description="Only letters older than this one: the last of the page before.",
            examples=[EXAMPLE_ID],
        ),
    ] = None,
) -> DeadLetters:
    """Entries that could not be decoded, or were delivered too often without success: newest first, without their payloads."""
    letters = [
        letter
        for name in ([stage] if stage is not None else Stage)
        for letter in await dead_letters.read(context.redis, record.id, name, before=before or "+", limit=limit)
    ]
    totals = {name.value: total for name, total in (await dead_letters.count(context.redis, record.id)).items()}
    return DeadLetters(totals=totals, letters=[DeadLetterInfo.model_validate(letter) for letter in letters])


@router.get(
    "/{stage}/{entry}", operation_id="get_dead_letter", summary="Read a dead letter", responses=documented(404, 422)
)
async def get_dead_letter(
    context: ContextDep, record: RecordDep, stage: StageDep, entry: EntryDep
) -> DeadLetterContent:
    """The letter with its payload, and what it says where it is MessagePack."""
    letter = await _find(context, record.id, stage, entry)
    shown = letter.payload[:SHOWN_BYTES]
    content = _content(letter.payload) if len(letter.payload) <= SHOWN_BYTES else None
    about = DeadLetterInfo.model_validate(letter).model_dump()
    return DeadLetterContent(**about, payload=base64.b64encode(shown).decode(), content=content)


@router.post(
    "/{stage}/{entry}/requeue",
    operation_id="requeue_dead_letter",
    summary="Put a dead letter back",
    responses=documented(404, 408, 409, 413, 422),
)
async def requeue_dead_letter(context: ContextDep, record: RecordDep, stage: StageDep, entry: EntryDep) -> Requeued:
    """Puts the entry back on its stream as if it were new, once; 409 when the job has ended or only a part of the payload was kept.

    Its group need not wait for this: the learner asks for it again after `rollout.group_timeout_s`. A group that has its fate by then
    takes no harm from an entry that comes back.
    """
    letter = await _find(context, record.id, stage, entry)
    await dead_letters.requeue(context.redis, record.id, stage, letter.id)
    await context.store.history.event(
        record.id, "requeued", {"stage": stage, "entry": letter.id, "member": letter.member, "reason": letter.reason}
    )
    return Requeued(stage=stage, entry=letter.id, member=letter.member)


async def _find(context: Context, job_id: str, stage: Stage, entry: str) -> DeadLetter:
    letter = await dead_letters.find(context.redis, job_id, stage, entry) if LETTER_ID.fullmatch(entry) else None
    if letter is None:
        raise HTTPException(404, "there is no such dead letter")
    return letter


def _content(payload: bytes) -> OpenObject | None:
    """The MessagePack map of a payload as JSON values, byte strings by their length; None when it is no map."""
    try:
        document = msgpack.unpackb(payload, raw=False, strict_map_key=True)
        return _jsonable(document, SHOWN_DEPTH) if isinstance(document, dict) else None
    except (ValueError, msgpack.exceptions.UnpackException):
        return None


def _jsonable(value: Any, depth: int) -> Any:  # noqa: ANN401  any value of MessagePack
    if isinstance(value, dict):
        return {str(k): _jsonable(v, depth - 1) for k, v in value.items()} if depth else "…"
    if isinstance(value, list):
        return [_jsonable(item, depth - 1) for item in value] if depth else "…"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if value is None or isinstance(value, bool | int):
        return value
    return value if isinstance(value, float) and value - value == 0 else str(value)
