"""Folder of what came from hubs: complete models and data files, and the parts of those that are still being fetched.

<home>/hubs/models/hf/ORG/NAME/<commit>/…             a whole model: its folder is there only once it is complete
<home>/hubs/data/hf/ORG/NAME/<commit>/<file>          a whole data file
<home>/hubs/partial/<key>/                            a fetch under way, or interrupted: plan.json, files/, lock
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.durable import fsync_directory
from services.common.spec.reference import Reference, parse_reference

MODELS, DATA, PARTIAL = "models", "data", "partial"
PLAN = "plan.json"
FILES = "files"
LOCK = "lock"


def relative_path(reference: Reference) -> Path:
    """Where a resolved reference lies below its root."""
    return Path(reference.hub, reference.repo, reference.revision, reference.file)


@dataclass(frozen=True, slots=True)
class Stored:
    """A model or a data file in the folder."""

    reference: Reference
    path: Path
    size_bytes: int
    whole: bool = True
    """Whether it is complete; else this is what an interrupted fetch has left, or one under way has so far."""


@dataclass(frozen=True, slots=True)
class HubFolder:
    """The folder's layout. Every reference given to it is resolved: it names a commit."""

    root: Path

    @property
    def roots(self) -> tuple[Path, Path]:
        """The directories of complete models and data files."""
        return self.root / MODELS, self.root / DATA

    def path(self, reference: Reference) -> Path:
        """Where it lies, or will lie, as a whole: a model's directory, or a data file."""
        return self.root / (DATA if reference.file else MODELS) / relative_path(reference)

    def is_complete(self, reference: Reference) -> bool:
        """Whether it is there, whole."""
        path = self.path(reference)
        return reference.resolved and (path.is_file() if reference.file else path.is_dir())

    def partial(self, reference: Reference) -> Path:
        """The directory of its fetch."""
        digest = hashlib.sha256(str(reference).encode()).hexdigest()[:12]
        return self.root / PARTIAL / f"{reference.repo.replace('/', '--')}-{digest}"

    def finish(self, reference: Reference) -> None:
        """Moves the files of a fetch to their place, durably, and removes the rest of it."""
        partial, path = self.partial(reference), self.path(reference)
        source = partial / FILES / reference.file
        fsync_directory(source.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        source.rename(path)
        fsync_directory(path.parent)
        shutil.rmtree(partial, ignore_errors=True)

    def discard(self, reference: Reference) -> None:
        """Removes what a fetch has left."""
        shutil.rmtree(self.partial(reference), ignore_errors=True)

    def remove(self, reference: Reference) -> bool:
        """Removes it, whole or partial; whether there was anything. A crash in between leaves nothing that looks whole."""
        path, partial = self.path(reference), self.partial(reference)
        found = path.exists() or partial.exists()
        if path.exists():
            partial.mkdir(parents=True, exist_ok=True)
            path.rename(partial / "removed")
            self._prune(path.parent)
        self.discard(reference)
        return found

    def stored(self, *, data: bool) -> Iterator[Stored]:
        """The data files, or models, by name; then what is there of others."""
        root = self.root / (DATA if data else MODELS)
        for folder in sorted(root.glob("*/*/*/*")):
            hub, organization, name, commit = folder.relative_to(root).parts
            reference = Reference(hub, f"{organization}/{name}", commit)
            if not data:
                yield Stored(reference, folder, size_of(folder))
                continue
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                file = Reference(hub, reference.repo, commit, path.relative_to(folder).as_posix())
                yield Stored(file, path, path.stat().st_size)

        yield from (item for item in self._partials() if bool(item.reference.file) is data)

    def _partials(self) -> Iterator[Stored]:
        for plan in sorted((self.root / PARTIAL).glob(f"*/{PLAN}")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is finished or removed meanwhile
                reference = parse_reference(json.loads(plan.read_bytes())["reference"])
                yield Stored(reference, plan.parent, size_of(plan.parent), whole=False)

    def _prune(self, folder: Path) -> None:
        """Removes directories that are empty now."""
        while folder != self.root and folder.is_relative_to(self.root):
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder; those that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total
