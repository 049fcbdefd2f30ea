"""What comes in under a name that is not its own is not taken for the group that it claims to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.common.errors import EntryError
from services.common.streams.codec import encode
from services.common.streams.consumer import Entry
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.loops.collect import decode_entry
from tests.unit.learner.scored_groups import scored_group

GROUP = scored_group(17, [1.0, 0.0])
MEMBER = GROUP.group.task.member


def with_task(**changes: object) -> ScoredGroup:
    task = replace(GROUP.group.task, **changes)  # type: ignore[arg-type]
    return replace(GROUP, group=replace(GROUP.group, task=task))


def test_a_scored_group_is_taken() -> None:
    assert (
        decode_entry(
            "job", Entry("1-0", MEMBER, encode(GROUP, MIN_ENTRY_BYTES), 1), MIN_ENTRY_BYTES
        ).group.task.group_id
        == 17
    )


@pytest.mark.parametrize(
    ("member", "payload", "reason"),
    [
        (MEMBER, b"\xc1", "not MessagePack: FormatError$"),
        ("train:1:18:1", encode(GROUP, MIN_ENTRY_BYTES), f"the entry says 'train:1:18:1', its task '{MEMBER}'"),
        (MEMBER, encode(with_task(job_id="another"), MIN_ENTRY_BYTES), "belongs to job 'another'"),
        (MEMBER, encode(with_task(group_id=3), MIN_ENTRY_BYTES), f"the entry says '{MEMBER}'"),
    ],
)
def test_anything_else_is_for_the_dead_letters_with_the_reason(member: str, payload: bytes, reason: str) -> None:
    with pytest.raises(EntryError, match=reason):
        decode_entry("job", Entry("1-0", member, payload, 1), MIN_ENTRY_BYTES)
