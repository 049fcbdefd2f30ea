"""Staging of received weights, complete and verified, until the engine takes them: safetensors files in host memory.

begin(specs) → write(…) … → commit → StagedWeights(path)        the newest two stay, older ones are removed
                         ↘ discard                              an incomplete file never has its final name
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from services.common.config.private_folder import home_prefix, is_own_directory, make_private
from services.common.errors import ConfigError, WeightSyncError
from services.common.weights.snapshot import TensorSpec
from services.common.weights.tensor_file import layout
from services.rollout.engine.types import StagedWeights

_PART = ".part"
_OURS = re.compile(r"v\d+-\d+-\d+\.safetensors(\.part)?")


class Stage:
    """A directory of staged versions, locked by one process at a time."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        """Locks the directory, and removes the files of a dead predecessor.

        Raises:
            ConfigError: the directory cannot be used, is not private, or another process uses it.
        """
        self.directory = directory
        self._keep = keep
        self._serial = 0
        self._staged: list[Path] = []
        try:
            make_private(directory)
            self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"stage directory {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"stage directory {directory} is in use") from error
        self._remove([path for path in directory.iterdir() if _OURS.fullmatch(path.name)])

    def begin(self, lineage: int, n: int, specs: Sequence[TensorSpec]) -> StageWriter:
        """Reserves the room for a version. Raises WeightSyncError when there is none, or a tensor's name twice."""
        self._serial += 1
        return StageWriter(self, lineage, n, self._serial, specs)

    def close(self) -> None:
        """Removes all staged files and the directory, and unlocks it."""
        self._remove(self._staged)
        self._staged.clear()
        with contextlib.suppress(OSError):  # it has other files in it, or is gone
            self.directory.rmdir()
        os.close(self._lock)

    def admit(self, part: Path) -> Path:
        """Gives a complete file its final name, in one step, and removes the oldest files."""
        path = part.with_name(part.name.removesuffix(_PART))
        part.replace(path)
        self._staged.append(path)
        self._remove(self._staged[: -self._keep])
        del self._staged[: -self._keep]
        return path

    @staticmethod
    def _remove(paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)


class StageWriter:
    """Writer of one version into the stage; leaving the `with` block without `commit` discards it."""

    def __init__(self, stage: Stage, lineage: int, n: int, serial: int, specs: Sequence[TensorSpec]) -> None:
        self._stage = stage
        self._lineage, self._n = lineage, n
        self._specs = tuple(specs)
        shapes = [(spec.name, spec.dtype, spec.shape) for spec in self._specs]
        plan = layout(shapes, {"lineage": str(lineage), "policy_version": str(n)})
        self._offsets = plan.offsets
        self._part = stage.directory / f"v{lineage}-{n}-{serial:04d}.safetensors{_PART}"
        self._file: int | None = os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Reserved before the first byte: a full disk is an error here, not a broken file later.
            os.posix_fallocate(self._file, 0, plan.total_bytes)
            self._put(0, plan.header)
        except OSError as error:
            self.discard()
            raise WeightSyncError(
                f"no room for {plan.total_bytes} bytes in {stage.directory}: {error.strerror}"
            ) from error

    def write(self, name: str, start: int, data: bytes | memoryview) -> None:
        """Writes plain bytes at an offset within a tensor. Raises WeightSyncError, which names it, when that fails."""
        try:
            self._put(self._offsets[name] + start, data)
        except OSError as error:
            raise WeightSyncError(f"{name}: cannot write {self._part}: {error.strerror}") from error

    def commit(self, *, fetch_s: float, wire_bytes: int) -> StagedWeights:
        """Makes the version visible, in one step. The caller has verified everything."""
        if self._file is None:
            raise WeightSyncError(f"version {(self._lineage, self._n)} was already committed or discarded")
        os.close(self._file)
        self._file = None
        return StagedWeights(
            self._lineage, self._n, self._stage.admit(self._part),
            digests={spec.name: spec.digest.hex() for spec in self._specs},
            total_bytes=sum(spec.nbytes for spec in self._specs), fetch_s=fetch_s, wire_bytes=wire_bytes,
        )  # fmt: skip

    def discard(self) -> None:
        """Removes the unfinished file; does nothing after a commit."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._part.unlink(missing_ok=True)

    def _put(self, position: int, data: bytes | memoryview) -> None:
        if self._file is None:
            raise WeightSyncError(f"version {(self._lineage, self._n)} was already committed or discarded")
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, position)
            position += written
            view = view[written:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def default_stage_directory(worker: str, home: Path, need_bytes: int, shared_memory: Path) -> Path:
    """Shared memory when it has room for `need_bytes` (three versions of the model: two kept, one arriving), else the home directory.

    Not shared memory where another user, who can write there too, has made something of that name.

    Raises:
        ConfigError: the worker's name cannot name a directory.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", worker):
        raise ConfigError(f"worker: {worker!r} cannot name a directory (letters, digits, '.', '_', '-')")
    shared = shared_memory / f"{home_prefix(home)}{worker}"
    available = not os.path.lexists(shared) or is_own_directory(shared)
    usable = available and shared_memory.is_dir() and os.access(shared_memory, os.W_OK)
    if usable and shutil.disk_usage(shared_memory).free >= need_bytes:
        return shared
    return home / "stage" / worker
