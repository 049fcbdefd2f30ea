"""Store of a job's kept samples, `<job>/samples.jsonl`: of every k-th step while the job runs, the newest ones at its end.

The file is bounded: when it is too large, only the samples of every second kept step stay, and further ones are as far apart.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.common.durable import write_durably
from services.common.jobs.elements import json_objects

SAMPLES_FILE = "samples.jsonl"
MAX_BYTES = 32 * 1024 * 1024

Sample = Mapping[str, Any]
_Key = tuple[Any, ...]


def step_of(sample: Sample) -> int | None:
    """The newest policy version that sampled the group; None where nothing was sampled."""
    return max((rollout["max_policy_version"] for rollout in sample.get("rollouts", ())), default=None)


def key_of(sample: Sample) -> _Key:
    """What tells a judged group from all others of the job."""
    return tuple(sample.get(name) for name in ("purpose", "lineage", "group_id", "attempt"))


def read_kept(folder: Path) -> list[dict[str, Any]]:
    """What the file has, oldest first; lines that are not whole are left out."""
    try:
        with (folder / SAMPLES_FILE).open("rb") as file:
            return json_objects(file)
    except FileNotFoundError:
        return []


class KeptSamples:
    """The file of one job, for its only writer."""

    def __init__(self, folder: Path, interval_steps: int, *, max_bytes: int = MAX_BYTES) -> None:
        """Reads what an earlier writer has kept. Raises OSError when it cannot be read."""
        self._folder, self._path, self._interval, self._max_bytes = (
            folder,
            folder / SAMPLES_FILE,
            interval_steps,
            max_bytes,
        )
        kept = read_kept(folder)
        self._keys = {key_of(sample) for sample in kept}

    def add(self, newest: Iterable[Sample], *, ended: bool) -> int:
        """Keeps those of every k-th step that it does not have, of a job that has ended all of them; how many.

        `newest`: oldest first. Raises OSError.
        """
        added = [
            sample
            for sample in newest
            if (ended or _is_of(sample, self._interval)) and key_of(sample) not in self._keys
        ]
        if added:
            content = b"".join(map(_line, added))
            size = self._path.stat().st_size if self._path.exists() else 0
            if size + len(content) > self._max_bytes:
                self._thin(added)
            else:
                _append(self._path, content)
            self._keys |= {key_of(sample) for sample in added}
        return len(added)

    def _thin(self, added: list[Sample]) -> None:
        """Writes the file anew, with steps twice as far apart until it is half full; the added ones, the newest, are in it."""
        kept: list[Sample] = [*read_kept(self._folder), *added]
        while sum(len(_line(sample)) for sample in kept) > self._max_bytes // 2:
            fewer = [sample for sample in kept if _is_of(sample, 2 * self._interval)]
            if 0 < len(fewer) < len(kept):
                kept, self._interval = fewer, 2 * self._interval
            else:  # all are of few steps
                kept = kept[len(kept) // 2 + 1 :]
        write_durably(self._path, b"".join(map(_line, kept)))


def _is_of(sample: Sample, interval: int) -> bool:
    """Whether the sample is of a step that is kept."""
    step = step_of(sample)
    return step is not None and step % interval == 0


def _line(sample: Sample) -> bytes:
    return json.dumps(sample, ensure_ascii=False).encode(errors="replace") + b"\n"


def _append(path: Path, content: bytes) -> None:
    """Adds whole lines; what a crash left of a line before them is ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        file.write(b"\n" + content if torn else content)
        os.fsync(descriptor)
