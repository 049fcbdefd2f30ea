"""Folder of a job, `<home>/jobs/<job>/`: the source from which its record is rebuilt when Redis has lost it.

spec.yaml       the resolved spec, every default written out
job.json        the job's record: replaced whole, durably, on every change of its state
history.jsonl   step and evaluation records, and checkpoints, one JSON object a line:
                {"kind": "step" | "eval" | "checkpoint" | "rewind", "step": …, "data": …}
journal/, checkpoints/, versions.jsonl, error.txt               written by the learner
trackers/, metrics.parquet, evals.parquet, samples.jsonl, curves.svg      written by the gateway (services/gateway/trackers)

Deleted jobs: folders under removal, and marks that stay for a week, so that no process brings a deleted job back.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from services.common.durable import fsync_directory, write_durably

log = logging.getLogger(__name__)

T = TypeVar("T")

SPEC_FILE = "spec.yaml"
JOB_FILE = "job.json"
HISTORY_FILE = "history.jsonl"
FORMAT = 1
DELETED_DIR = ".deleted"
MARK_KEPT_S = 7 * 24 * 3600.0
"""Longer than a process stays stopped, and than a Redis backup is old when it is restored."""


@dataclass(slots=True)
class History:
    """Step and evaluation records of the job's current course, without what rewinds dropped; oldest first."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    manifests: dict[int, set[str]] = field(default_factory=dict)
    """Step → digests of the manifests of the checkpoints that were begun there."""
    unreadable: list[int] = field(default_factory=list)
    """Line numbers, from 1, that hold no record: left incomplete by a crash, or damaged."""

    def apply(self, kind: str, step: int, data: dict[str, Any]) -> None:
        """Applies one line. A step or an evaluation replaces an older record of its step; a rewind drops the records of later steps."""
        if kind == "step":
            self._drop_steps(step)
            self.steps.append(data)
        elif kind == "eval":
            self.evals = [record for record in self.evals if record["step"] != step]
            self.evals.append(data)
        elif kind == "checkpoint":
            self.manifests.setdefault(step, set()).add(str(data["manifest"]))
        elif kind == "rewind":
            self._drop_steps(step + 1)
            self.manifests = {saved: digests for saved, digests in self.manifests.items() if saved <= step}
            self.evals = [record for record in self.evals if record["step"] <= step]

    def _drop_steps(self, first: int) -> None:
        while self.steps and self.steps[-1]["step"] >= first:
            self.steps.pop()


class JobFolder:
    """Reader and writer of those files. Synchronous: call it from a thread where an event loop must not wait for a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, record: dict[str, Any], spec: Callable[[], str]) -> None:
        """Writes the record durably, and the spec, if it is not there yet: only then is its text requested.

        The incarnation in the folder only rises: a record restored into Redis has none until its head finds it, and the next head
        must not get the number of an older head, which may wake up. The folder of a deleted job is not made again.
        """
        if is_deleted(self.path):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        record = record | {"incarnation": max(record["incarnation"], self.incarnation())}
        if not (self.path / SPEC_FILE).exists():
            write_durably(self.path / SPEC_FILE, spec().encode())
        document = {"format": FORMAT, **record}
        document["xxh3"] = digest_of_document(document)
        write_durably(self.path / JOB_FILE, json.dumps(document, indent=1).encode())

    def load(self) -> tuple[dict[str, Any], str] | None:
        """The record and the spec's text; None when this is no job's folder or cannot be read (the reason is logged)."""
        document = self._document()
        spec = None if document is None else self._read(SPEC_FILE, str)
        return None if document is None or spec is None else (document, spec)

    def fault(self) -> str | None:
        """Why `job.json` is not what was written, or None; old ones have no checksum. Raises FileNotFoundError."""
        try:
            document = json.loads((self.path / JOB_FILE).read_bytes())
            state, digest = document["state"], document.pop("xxh3", None)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"cannot be read: {type(error).__name__}: {error}"
        if document.get("format") != FORMAT:
            return f"is of format {document.get('format')}, and format {FORMAT} is known here"
        if digest is not None and digest != digest_of_document(document):
            return "is not what was written: its checksum differs"
        return None if isinstance(state, str) else f"names the state {state!r}"

    def incarnation(self) -> int:
        """The highest incarnation that the folder records; 0 when it has none."""
        known = (self._document() or {}).get("incarnation")
        return known if isinstance(known, int) else 0

    def _document(self) -> dict[str, Any] | None:
        document = self._read(JOB_FILE, json.loads)
        if document is None:
            return None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            log.warning("%s: not a record of format %d", self.path / JOB_FILE, FORMAT)
            return None
        return document

    def _read(self, name: str, parse: Callable[[str], T]) -> T | None:
        """The content of a file; None when there is none, or it cannot be read (the reason is logged)."""
        try:
            return parse((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", self.path / name, error)
            return None

    def append(self, kind: str, step: int, data: dict[str, Any]) -> None:
        """Adds a line, durably; ends one that a crash cut off. Raises OSError (a full disk); then nothing is left."""
        path = self.path / HISTORY_FILE
        line = json.dumps({"kind": kind, "step": step, "data": data})
        with path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            try:
                rest = memoryview(f"{line}\n".encode())
                while rest:  # on a disk that fills up, a write takes only a part
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise

    def history(self) -> History:
        """The history; a line that cannot be read is left out and logged."""
        found = History()
        try:
            lines = (self.path / HISTORY_FILE).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return found
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line)
                found.apply(item["kind"], int(item["step"]), dict(item["data"]))
            except (ValueError, KeyError, TypeError):
                found.unreadable.append(number)
                log.warning("%s: line %d cannot be read", self.path / HISTORY_FILE, number)
        return found


def digest_of_document(document: dict[str, Any]) -> str:
    """xxh3-128 of JSON values, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def is_deleted(job_folder: Path) -> bool:
    """Whether the job of this folder has been deleted."""
    return (job_folder.parent / DELETED_DIR / job_folder.name).is_dir()


class DeletedJobs:
    """The deleted jobs of one home. Synchronous: call it from a thread where an event loop must not wait for a disk."""

    def __init__(self, jobs_dir: Path) -> None:
        self._jobs_dir, self._folder = jobs_dir, jobs_dir / DELETED_DIR

    def move_away(self, job_id: str) -> None:
        """Marks the job as deleted and moves its folder away, durably. A repeated call moves a folder that was made again meanwhile.

        Raises:
            OSError: the folder cannot be renamed.
        """
        mark = self._folder / job_id
        if not mark.is_dir():
            mark.mkdir(parents=True)
            fsync_directory(self._folder)
        with suppress(FileNotFoundError):
            (self._jobs_dir / job_id).rename(mark / secrets.token_hex(4))
            fsync_directory(mark)
            fsync_directory(self._jobs_dir)

    def remove_files(self, job_id: str) -> None:
        """Removes the folders that were moved; the mark stays. A failure is logged, and the next sweep tries again."""
        for moved in list(self._moved(job_id)):
            try:
                moved.unlink() if moved.is_symlink() else shutil.rmtree(moved)
            except FileNotFoundError:  # another gateway removes it, too
                continue
            except OSError as error:
                log.warning("%s cannot be removed: %s", moved, error)

    def has_mark(self, job_id: str) -> bool:
        """Whether the job has a mark."""
        return is_deleted(self._jobs_dir / job_id)

    def marked(self) -> list[str]:
        """The ids of all jobs that have a mark."""
        return sorted(mark.name for mark in self._folder.glob("*") if mark.is_dir())

    def unfinished(self, job_id: str) -> bool:
        """Whether files of a deleted job are still there, or there again."""
        return os.path.lexists(self._jobs_dir / job_id) or any(self._moved(job_id))

    def forget_old(self, now: float | None = None) -> None:
        """Removes the marks that are older than `MARK_KEPT_S`."""
        oldest = (time.time() if now is None else now) - MARK_KEPT_S
        for job_id in self.marked():
            mark = self._folder / job_id
            with suppress(OSError):  # not empty, or gone
                if mark.stat().st_mtime < oldest:
                    mark.rmdir()

    def _moved(self, job_id: str) -> Iterator[Path]:
        return (self._folder / job_id).glob("*")
