"""Limits of a stream entry: its bytes, which follow from the job's spec, and the number of its values.

spec ── entry_limit ──► bytes: the same for all who write or read the job's entries, its journal included
                          └── more than MILLRACE_MAX_ENTRY_BYTES: the job is refused when it is submitted
"""

from __future__ import annotations

import struct
from struct import Struct

from services.common.errors import EntryError
from services.common.spec.learner import EvalSpec
from services.common.spec.rollout import RolloutSpec

MIN_ENTRY_BYTES = 4 * 1024**2
"""Limit of most jobs; none has a lower one."""
MAX_ENTRY_BYTES = 512 * 1024**2
"""No job has a higher limit: Redis takes no larger value."""
TASK_BYTES = 3 * 1024**2
"""Room for the task (2 MiB, see `data/bounds.py`) and the token ids of its prompt."""
ROLLOUT_BYTES = 4096
"""Room of a rollout besides its tokens: names of fields, spans of versions, a verdict with its detail."""
TOKEN_BYTES = 24
"""Room of a token: 4 for its id, 4 for its log-prob, 16 for its text.

Text takes 2 to 6 bytes a token in English, mathematics and code, and up to 10 in Cyrillic and Indic scripts with vocabularies of 200,000.
Only runs of one character take more (125 with 128 blanks in one token): a few such responses fit into what the others leave.
"""
MAX_VALUES = MIN_ENTRY_BYTES
"""Most values in one entry. One of MIN_ENTRY_BYTES cannot have more, so a larger one takes no more memory for them when it is decoded."""


def needed_bytes(rollout: RolloutSpec, evaluation: EvalSpec) -> int:
    """Bytes that the largest group of a job may take: all its responses of the full length. At least MIN_ENTRY_BYTES.

    Later releases may raise the result for a spec, never lower it: a job's limit is also that of its journal.
    """
    group = largest_group(rollout, evaluation)
    return max(MIN_ENTRY_BYTES, TASK_BYTES + group * (ROLLOUT_BYTES + rollout.rollout_max_tokens * TOKEN_BYTES))


def entry_limit(rollout: RolloutSpec, evaluation: EvalSpec) -> int:
    """Largest stream entry of a job, bytes: `needed_bytes`, at most MAX_ENTRY_BYTES (in jobs of releases that refused none)."""
    return min(needed_bytes(rollout, evaluation), MAX_ENTRY_BYTES)


def largest_group(rollout: RolloutSpec, evaluation: EvalSpec) -> int:
    """Rollouts of the job's largest groups: `rollout.group_size`, or `eval.samples` where they are more."""
    return max(rollout.group_size, evaluation.samples if evaluation.enabled else 0)


def check_values(payload: bytes) -> None:
    """Raises EntryError unless the MessagePack payload is complete and has at most MAX_VALUES values. Builds none of them.

    Without it an entry of 64 MiB could become 4 GiB of empty maps.
    """
    position, missing, seen = 0, 1, 0
    try:
        while missing:
            head, count, content = _HEADS[payload[position]]
            if head is not None:
                length = head.unpack_from(payload, position + 1)[0]
                position += head.size
                if count:
                    count *= length
                else:
                    content += length
            position += 1 + content
            seen, missing = seen + 1, missing - 1 + count
            if seen + missing > MAX_VALUES:
                raise EntryError(f"the entry has more than {MAX_VALUES} values")
    except (IndexError, struct.error) as short:
        raise EntryError("not MessagePack: it ends too early") from short
    if position > len(payload):
        raise EntryError("not MessagePack: it ends too early")


_Head = tuple[Struct | None, int, int]
"""What follows a value's first byte: a length or None, values inside (for each of the length), bytes of content besides the length's."""


def _heads() -> list[_Head]:
    """The 256 first bytes of MessagePack's values."""
    u8, u16, u32 = Struct(">B"), Struct(">H"), Struct(">I")
    heads: list[_Head] = [(None, 0, 0)] * 256
    for number in range(16):
        heads[0x80 + number], heads[0x90 + number] = (None, 2 * number, 0), (None, number, 0)
    for number in range(32):
        heads[0xA0 + number] = (None, 0, number)
    for first, lengths, extra in ((0xC4, (u8, u16, u32), 0), (0xC7, (u8, u16, u32), 1), (0xD9, (u8, u16, u32), 0)):
        heads[first : first + 3] = [(length, 0, extra) for length in lengths]
    heads[0xCA], heads[0xCB] = (None, 0, 4), (None, 0, 8)
    for number in range(4):
        heads[0xCC + number] = heads[0xD0 + number] = (None, 0, 1 << number)
    for number in range(5):
        heads[0xD4 + number] = (None, 0, 1 + (1 << number))
    heads[0xDC], heads[0xDD], heads[0xDE], heads[0xDF] = (u16, 1, 0), (u32, 1, 0), (u16, 2, 0), (u32, 2, 0)
    return heads


_HEADS = _heads()
