"""History of a job for one tracker: the points after a position, and the position, which is recorded durably.

    history.jsonl ── lines from `bytes` on ──► points ──► a sink accepts them ──► the next position

The history only grows, and a position counts whole lines of it: what was accepted is not read again, and nothing is left out.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.durable import write_durably
from services.gateway.trackers.names import figures

log = logging.getLogger(__name__)

FORMAT = 1
CHUNK_BYTES = 1 << 20
"""Most bytes of the history that make one batch; a longer line is read whole."""


@dataclass(frozen=True, slots=True)
class Point:
    """One line of the history. Example: Point(17, "step", 12, 1795348800.0, {"actor/loss": 0.12})."""

    line: int
    """Its number in the file, from 1: it only grows, also where a job goes back to an earlier step."""
    kind: str
    """`step`, `eval`, or `rewind`: the points of later steps count no more."""
    step: int
    at: float
    """Unix seconds; 0 where the line does not say."""
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Position:
    """What a tracker has of a history."""

    bytes: int = 0
    """Bytes of whole lines that it has accepted."""
    lines: int = 0
    ended: str = ""
    """State of the ended job that it has accepted; empty before."""
    own: dict[str, Any] = field(default_factory=dict)
    """JSON values of the tracker's own, of the same moment."""

    @classmethod
    def load(cls, path: Path) -> Position:
        """The recorded position; the beginning where there is none, or the file cannot be read (the reason is logged)."""
        try:
            document = json.loads(path.read_text())
            if document.pop("format") != FORMAT:
                raise ValueError("its format is not known here")  # noqa: TRY301
            return cls(**document)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, so all is sent again: %s", path, error)
            return cls()

    def save(self, path: Path) -> None:
        """Records it durably. Raises OSError."""
        write_durably(path, json.dumps({"format": FORMAT, **asdict(self)}).encode())


def read_points(path: Path, position: Position, limit_bytes: int = CHUNK_BYTES) -> tuple[list[Point], Position, bool]:
    """The points after the position, the position after them, and whether they are the last there are. Raises OSError.

    Lines that hold no figures, or are damaged, are passed over. A history that is shorter than the position was replaced: all of it
    is new.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [], position, True
    if size < position.bytes:
        log.warning("%s is shorter than what was sent of it: all is sent again", path)
        position = replace(position, bytes=0, lines=0)
    with path.open("rb") as file:
        file.seek(position.bytes)
        data = file.read(limit_bytes)
        while b"\n" not in data and (more := file.read(limit_bytes)):
            data += more
    whole = data[: data.rfind(b"\n") + 1]
    lines = whole.splitlines()
    found = [_point(position.lines + number, line) for number, line in enumerate(lines, 1)]
    after = replace(position, bytes=position.bytes + len(whole), lines=position.lines + len(lines))
    return [point for point in found if point is not None], after, len(whole) == 0 or after.bytes >= size


def _point(number: int, line: bytes) -> Point | None:
    try:
        item = json.loads(line)
        kind, step, data = item["kind"], int(item["step"]), dict(item["data"])
        if kind not in {"step", "eval", "rewind"}:
            return None
        return Point(number, kind, step, float(data.get("at") or 0.0), {} if kind == "rewind" else figures(kind, data))
    except (ValueError, KeyError, TypeError):
        log.warning("line %d of the history cannot be read", number)
        return None
