"""Staging of policy versions as safetensors files in host memory: the learner writes them there, a rollout server receives them there.

begin(specs) → write(…) … → commit → StagedWeights(path)        the newest few stay, older ones are removed
                         ↘ discard                              an incomplete file never has its final name
link(path) → check(…)     → commit                              the file of another stage on this host, without a copy
part() → a file is written there → admit
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.config.private_folder import home_prefix, is_own_directory, make_private
from services.common.errors import ConfigError, WeightSyncError
from services.common.weights.snapshot import PolicyVersion, TensorSpec
from services.common.weights.tensor_file import layout, verify_file

_PART = ".part"
_OURS = re.compile(r"v\d+-\d+-\d+\.safetensors(\.part)?")


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A complete and verified policy version in a file that the engine can load."""

    lineage: int
    policy_version: int
    path: Path
    """A safetensors file such as `v1-4-0005.safetensors`; kept until two newer versions are staged."""
    digests: dict[str, str]
    """xxh3-128 of each tensor's plain bytes, in hex."""
    total_bytes: int
    """Plain bytes of all tensors."""
    fetch_s: float
    """Seconds from the request to the verified file."""
    wire_bytes: int
    """Payload bytes received: fewer than `total_bytes` when a delta was sent, none when the file itself was taken."""


class Stage:
    """A directory of staged versions, locked by one process at a time; a file never changes once it has its final name."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        """Locks the directory, and removes the files of a dead predecessor.

        Raises:
            ConfigError: the directory cannot be used, is not private, or another process uses it.
        """
        self.directory = directory
        self._keep = keep
        self._serial = 0
        self._staged: list[Path] = []
        self._lock: int | None = None
        try:
            make_private(directory)
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"stage directory {directory}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(f"stage directory {directory} is in use") from error
        self._lock = lock
        self._remove([path for path in directory.iterdir() if _OURS.fullmatch(path.name)])

    def part(self, lineage: int, n: int) -> Path:
        """Path for an unfinished file of the version; a later call gives another one."""
        self._serial += 1
        return self.directory / f"v{lineage}-{n}-{self._serial:04d}.safetensors{_PART}"

    def begin(self, lineage: int, n: int, specs: Sequence[TensorSpec]) -> StageWriter:
        """Reserves the room for a version. Raises WeightSyncError when there is none, or a tensor's name twice."""
        return StageWriter(self, lineage, n, specs)

    def link(self, version: PolicyVersion, path: Path, specs: Sequence[TensorSpec], started: float) -> StagedWeights:
        """Takes the file of another stage on this file system, of this user, without a copy; compares every tensor with its digest.

        `started`: monotonic seconds of the request.

        Raises:
            OSError: there is no such file here, or it cannot be linked.
            WeightSyncError: it does not hold what the digests say; names the tensor.
        """
        part = self.part(*version)
        os.link(path, part, follow_symlinks=False)
        try:
            _require_own(part, path)
            verify_file(part, specs)
        except BaseException:
            part.unlink()
            raise
        return _staged(version, self.admit(part), specs, fetch_s=time.monotonic() - started, wire_bytes=0)

    def close(self) -> None:
        """Removes all staged files and the directory, and unlocks it; once."""
        if self._lock is None:
            return
        self._remove(self._staged)
        self._staged.clear()
        with contextlib.suppress(OSError):  # it has other files in it, or is gone
            self.directory.rmdir()
        os.close(self._lock)
        self._lock = None

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

    def __init__(self, stage: Stage, lineage: int, n: int, specs: Sequence[TensorSpec]) -> None:
        self._stage = stage
        self._lineage, self._n = lineage, n
        self._specs = tuple(specs)
        shapes = [(spec.name, spec.dtype, spec.shape) for spec in self._specs]
        plan = layout(shapes, {"lineage": str(lineage), "policy_version": str(n)})
        self._offsets = plan.offsets
        self._part = stage.part(lineage, n)
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
        version, path = PolicyVersion(self._lineage, self._n), self._stage.admit(self._part)
        return _staged(version, path, self._specs, fetch_s=fetch_s, wire_bytes=wire_bytes)

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


def _require_own(part: Path, path: Path) -> None:
    """Another user could change the bytes after they were compared."""
    if part.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path} is not this user's")


def _staged(
    version: PolicyVersion, path: Path, specs: Sequence[TensorSpec], *, fetch_s: float, wire_bytes: int
) -> StagedWeights:
    return StagedWeights(
        version.lineage, version.n, path,
        digests={spec.name: spec.digest.hex() for spec in specs},
        total_bytes=sum(spec.nbytes for spec in specs), fetch_s=fetch_s, wire_bytes=wire_bytes,
    )  # fmt: skip


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes the stages in a directory whose names have this prefix and whose processes have ended."""
    for directory in parent.glob(f"{glob.escape(prefix)}*"):
        if is_own_directory(directory):
            with contextlib.suppress(ConfigError):  # in use
                Stage(directory).close()


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
