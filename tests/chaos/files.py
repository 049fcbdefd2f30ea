"""Flipped bits and cut ends in the files of a job: all are noticed, and recovery falls back to what is sound.

The files are written by the learner's own journal and checkpoint code, and read by its own recovery.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.checkpoints.manifest import CHECKPOINTS_DIR, Checkpoint, read_manifest
from services.common.errors import MillraceError
from services.learner.storage.checkpoints import CheckpointStore
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.chaos.written import Writer

STEPS = 12


def flips(options: Options) -> Result:
    """`count` times: one bit of one file is flipped, what is read is compared with what was written, and the bit is flipped back."""
    started, rng = time.monotonic(), random.Random(options.seed)
    result = Result("flipped bits in checkpoint and journal files", 0, options.seed)
    folder = options.home / "job"
    sound = write(folder)
    files = read_files(folder)
    struck: dict[str, int] = {}
    for _ in range(options.count):
        path = rng.choice(files)
        content = path.read_bytes()
        spoiled = bytearray(content)
        place = rng.randrange(len(spoiled))
        spoiled[place] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(spoiled))
        kind = (
            "journal"
            if path.suffix == ".wal"
            else "manifest"
            if path.suffix == ".json" and "MANIFEST" in path.name
            else "checkpoint"
        )
        struck[kind] = struck.get(kind, 0) + 1
        for trouble in _believed(folder, path, sound):
            result.violations.append(f"{path.relative_to(folder)}, byte {place}: {trouble}")
        path.write_bytes(content)
        result.count += 1
    result.extra = {"struck": dict(sorted(struck.items()))}
    result.seconds = time.monotonic() - started
    return result


def read_files(folder: Path) -> list[Path]:
    """The files that recovery reads when all is well: those of the newest checkpoint, and the journal's."""
    newest = folder / CHECKPOINTS_DIR / f"step-{STEPS:08d}"
    return sorted(path for root in (newest, folder / JOURNAL_DIR) for path in root.rglob("*") if path.is_file())


def _believed(folder: Path, path: Path, sound: Written) -> Iterator[str]:
    """What recovery takes for true of a spoiled folder, though it was not written so; and damage that it does not notice."""
    try:
        read = readable(folder)
    except MillraceError:
        return
    except Exception as error:  # noqa: BLE001  whatever it is, recovery must not end with it
        yield f"recovery died: {type(error).__name__}: {error}"
        return
    if read.checkpoint == sound.checkpoint and read.records == sound.records:
        yield f"{path.name} is damaged, and nobody noticed"
    if read.checkpoint not in sound.checkpoints:
        yield f"believed the checkpoint {read.checkpoint[:120]}"
    yield from (f"believed the record {item[:120]}" for item in read.records if item not in sound.records)


@dataclass(frozen=True, slots=True)
class Written:
    """What recovery reads of a folder."""

    checkpoint: str
    """The newest one that verifies, with what is in it."""
    records: list[str]
    checkpoints: frozenset[str] = frozenset()
    """All that were written."""


def readable(folder: Path) -> Written:
    """What recovery reads."""
    checkpoint = CheckpointStore(folder / CHECKPOINTS_DIR, keep=9).newest()
    return Written(
        _content(checkpoint) if checkpoint is not None else "none",
        [str(record) for record in Journal(folder / JOURNAL_DIR).records()],
    )


def _content(checkpoint: Checkpoint) -> str:
    files = {path.name: path.read_text() for path in sorted(checkpoint.path.glob("rank-*"))}
    return json.dumps([checkpoint.step, checkpoint.state, files], sort_keys=True)


def write(folder: Path) -> Written:
    """A job of STEPS steps with its journal and its checkpoints; what recovery should read of it."""
    Writer(folder).steps(STEPS)
    sound = readable(folder)
    finished = sorted((folder / CHECKPOINTS_DIR).glob("step-????????"))
    return replace(sound, checkpoints=frozenset(_content(read_manifest(path)) for path in finished))


def cut_ends(options: Options) -> Result:
    """`count` times: a file of the newest checkpoint, or the journal's segment, loses its end at a random byte.

    A journal that ends within a record is what a crash leaves: the records before it are believed, and nothing else.
    """
    started, rng = time.monotonic(), random.Random(options.seed)
    result = Result("cut ends of checkpoint and journal files", 0, options.seed)
    folder = options.home / "job"
    sound = write(folder)
    for _ in range(options.count):
        path = rng.choice(read_files(folder))
        content = path.read_bytes()
        path.write_bytes(content[: rng.randrange(len(content))])
        result.violations += [f"{path.relative_to(folder)}: {trouble}" for trouble in _believed(folder, path, sound)]
        path.write_bytes(content)
        result.count += 1
    result.seconds = time.monotonic() - started
    return result
