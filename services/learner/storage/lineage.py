"""Lineage of a job: rises when recovery restores less than there was before, so that a version never names two sets of weights.

It is in `<job folder>/lineage.json`, which is written before anything of the new lineage is published. Without the file it is 1.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from services.common.durable import write_durably
from services.common.errors import MillraceError
from services.learner.storage.folder import LINEAGE_FILE


class LineageError(MillraceError):
    """The lineage file does not verify; names it."""


@dataclass(frozen=True, slots=True)
class Rise:
    """Beginning of a lineage.

    Example: Rise(lineage=2, after_step=7, reason="segment-0000000001.wal: the record at byte 812 is damaged", at=1795630000.0)
    """

    lineage: int
    after_step: int
    """Steps up to this one were taken over from the previous lineage."""
    reason: str
    at: float
    """Unix seconds."""


FIRST = Rise(1, 0, "", 0.0)


def read_rises(folder: Path) -> list[Rise]:
    """Every lineage of the job in order, the current one last; LineageError if the file is damaged."""
    path = folder / LINEAGE_FILE
    try:
        data = path.read_bytes()
        rises = [Rise(**item) for item in json.loads(data)["rises"]]
        sound = data == _dump(rises)
    except FileNotFoundError:
        return [FIRST]
    except (ValueError, KeyError, TypeError) as error:
        raise LineageError(f"{path}: damaged: {error}") from error
    if not (sound and rises):
        raise LineageError(f"{path}: damaged: its checksum differs")
    return rises


def raise_lineage(folder: Path, rises: list[Rise], lineage: int, after_step: int, reason: str) -> Rise:
    """Begins a lineage, durably; ValueError if it is not above the current one."""
    if lineage <= rises[-1].lineage:
        raise ValueError(f"lineage {lineage} is not above {rises[-1].lineage}")
    rise = Rise(lineage, after_step, reason, round(time.time(), 3))
    write_durably(folder / LINEAGE_FILE, _dump([*rises, rise]))
    return rise


def _dump(rises: list[Rise]) -> bytes:
    body: dict[str, Any] = {"rises": [asdict(rise) for rise in rises]}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps(body | {"xxh3": digest}, indent=1, sort_keys=True).encode()
