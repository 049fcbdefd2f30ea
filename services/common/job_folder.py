"""A job's own folder, `<home>/jobs/<job>/`: the source from which its record is rebuilt when Redis has lost it.

spec.yaml       the resolved spec, every default written out
job.json        the job's record: replaced whole, durably, on every move of its state
history.jsonl   step and evaluation records, one JSON object a line: {"kind": "step" | "eval" | "rewind", "step": …, "data": …}
journal/, checkpoints/, error.txt               the learner's
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.durable import write_durably

log = logging.getLogger(__name__)

SPEC_FILE = "spec.yaml"
JOB_FILE = "job.json"
HISTORY_FILE = "history.jsonl"
FORMAT = 1


@dataclass(slots=True)
class History:
    """Step and evaluation records as the surviving course of the job has them, oldest first."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)

    def take(self, kind: str, step: int, data: dict[str, Any]) -> None:
        """Applies one line. A step or an evaluation takes the place of an older record of the same step; a rewind drops what came after."""
        if kind == "step":
            self._drop_steps(step)
            self.steps.append(data)
        elif kind == "eval":
            self.evals = [record for record in self.evals if record["step"] != step]
            self.evals.append(data)
        elif kind == "rewind":
            self._drop_steps(step + 1)
            self.evals = [record for record in self.evals if record["step"] <= step]

    def _drop_steps(self, first: int) -> None:
        while self.steps and self.steps[-1]["step"] >= first:
            self.steps.pop()


class JobFolder:
    """Reads and writes those files; synchronous, so call it from a thread where a loop must not wait for a disk."""

    def __init__(self, path: Path) -> None:
        """Nothing is made before the first write."""
        self.path = path

    def save(self, record: dict[str, Any], spec: Callable[[], str]) -> None:
        """Makes the record durable, and the spec, whose text is asked for then, if it is not there yet.

        The incarnation in the folder only rises: a record that was put back into Redis has none until its head finds it, and the next head
        must not be given a number that an older one, which may wake up, has had.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        record = record | {"incarnation": max(record["incarnation"], self.incarnation())}
        if not (self.path / SPEC_FILE).exists():
            write_durably(self.path / SPEC_FILE, spec().encode())
        write_durably(self.path / JOB_FILE, json.dumps({"format": FORMAT, **record}, indent=1).encode())

    def load(self) -> tuple[dict[str, Any], str] | None:
        """The record and the spec's text, or None when this is no job's folder or cannot be read (the log says why)."""
        document = self._document()
        try:
            return None if document is None else (document, (self.path / SPEC_FILE).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", self.path / SPEC_FILE, error)
            return None

    def incarnation(self) -> int:
        """The highest that the folder knows of; 0 when it does not say."""
        known = (self._document() or {}).get("incarnation")
        return known if isinstance(known, int) else 0

    def _document(self) -> dict[str, Any] | None:
        try:
            document = json.loads((self.path / JOB_FILE).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", self.path / JOB_FILE, error)
            return None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            log.warning("%s: not a record of format %d", self.path / JOB_FILE, FORMAT)
            return None
        return document

    def append(self, kind: str, step: int, data: dict[str, Any]) -> None:
        """Adds a line to the history, durably. A line that a crash left unfinished is closed first.

        Raises:
            OSError: it could not be written, for want of space perhaps; nothing of it is left.
        """
        path = self.path / HISTORY_FILE
        line = json.dumps({"kind": kind, "step": step, "data": data})
        with path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            try:
                rest = memoryview(f"{line}\n".encode())
                while rest:  # on a disk that fills up, a part goes in first
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise

    def history(self) -> History:
        """The history; a line that cannot be read is left out, and told in the log."""
        found = History()
        try:
            lines = (self.path / HISTORY_FILE).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return found
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line)
                found.take(item["kind"], int(item["step"]), dict(item["data"]))
            except (ValueError, KeyError, TypeError):
                log.warning("%s: line %d cannot be read", self.path / HISTORY_FILE, number)
        return found
