"""What tampers with the weight chunks on their way from the learner: a share of them is sent wrongly, each in one of the ways."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.pb import weight_sync_pb2 as pb
from services.common.weight_sync import server, store
from services.common.weight_sync.server import WeightService

SHARE = 0.15
"""Of the chunks."""
WAYS = ("flip", "drop", "reorder", "repeat", "checksum", "shorten")
TAMPER = "MILLRACE_CHAOS_TAMPER"
"""Environment variable: the seed of a rank that tampers with what its head sends."""
SMALL_CHUNK_BYTES = 1024
"""In a stack, whose model is small."""

Replies = Iterator[pb.FetchReply]


class Tamperer:
    """Goes between the server and the wire."""

    def __init__(self, seed: int) -> None:
        """Has touched nothing."""
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        """Chunks, by the way in which they were sent wrongly."""

    def spoil(self, replies: Replies) -> Replies:
        """The replies of one Fetch, some of them wrong."""
        late: pb.FetchReply | None = None
        for reply in replies:
            if reply.WhichOneof("part") != "chunk" or self._random.random() >= SHARE:
                yield reply
                if late is not None:
                    yield late
                    late = None
                continue
            way = self._random.choice(WAYS)
            self.counts[way] += 1
            if way == "reorder":
                late = pb.FetchReply.FromString(reply.SerializeToString())
            elif way == "repeat":
                yield reply
                yield reply
            elif way != "drop":
                yield self._spoiled(reply, way)

    def _spoiled(self, reply: pb.FetchReply, way: str) -> pb.FetchReply:
        data = bytearray(reply.chunk.data)
        if way == "flip":
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        elif way == "shorten":
            del data[self._random.randrange(len(data)) :]
        else:
            reply.chunk.checksum ^= 1 << self._random.randrange(63)
        reply.chunk.data = bytes(data)
        return reply


def install(folder: Path) -> None:
    """Lets this process's weight server send a share of its chunks wrongly, if the environment says so."""
    if TAMPER not in os.environ:
        return
    tamperer, fetch, note = Tamperer(int(os.environ[TAMPER])), WeightService.Fetch, folder / f"tampered-{os.getpid()}"
    vars(store)["CHUNK_BYTES"] = SMALL_CHUNK_BYTES
    vars(server)["boot_id"] = lambda: "of another host"  # else the servers would take the files

    def tampered(service: WeightService, request: pb.FetchRequest, context: Any) -> Replies:
        try:
            yield from tamperer.spoil(fetch(service, request, context))
        finally:
            draft = note.with_name(f".{note.name}")
            draft.write_text(json.dumps(tamperer.counts))
            draft.rename(note)

    WeightService.Fetch = tampered  # type: ignore[method-assign, assignment]


def counts(folder: Path) -> Counter[str]:
    """What the learners of a stack have sent wrongly so far."""
    found: Counter[str] = Counter()
    for path in folder.glob("tampered-*"):
        found.update(json.loads(path.read_text()))
    return found
