"""Catalog of what a job on this installation may name: its models, its data files and its verifiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from services.common.config.hub_folder import Stored, size_of
from services.common.config.settings import Settings
from services.common.config.verifiers import available
from services.common.errors import ModelError
from services.common.models.directory import read_json
from services.common.spec.data import FILE_SUFFIXES

MAX_ENTRIES = 500
"""Of each kind."""
MAX_DEPTH = 4
"""Directories below a root."""
MAX_VISITED = 20_000
"""Entries of the directories below one root that are looked at."""
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model's directory, or a data file."""

    name: str
    """What a job writes in `model.path` or `data.train.source`."""
    path: str
    """Absolute."""
    size_bytes: int
    architecture: str = ""
    """A model's, from its config.json; empty where that does not say."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """All of it; `truncated`: there are more models or files than these."""

    models: list[CatalogEntry]
    data: list[CatalogEntry]
    verifiers: list[str]
    truncated: bool


def read_catalog(settings: Settings) -> Catalog:
    """What the installation has now, by name; a directory that cannot be read counts as empty."""
    models = list(islice(models_of(settings), MAX_ENTRIES + 1))
    data = list(islice(data_of(settings), MAX_ENTRIES + 1))
    more = len(models) > MAX_ENTRIES or len(data) > MAX_ENTRIES
    return Catalog(models[:MAX_ENTRIES], data[:MAX_ENTRIES], available(), more)


def models_of(settings: Settings) -> Iterator[CatalogEntry]:
    """Models that are registered or below `model_roots`, then those that were fetched from hubs."""
    for name, path in _below([settings.models_dir, *settings.model_roots], _is_model):
        yield CatalogEntry(name, str(path), size_of(path), _architecture(path))
    for stored in _whole(settings, data=False):
        yield CatalogEntry(str(stored.reference), str(stored.path), stored.size_bytes, _architecture(stored.path))


def data_of(settings: Settings) -> Iterator[CatalogEntry]:
    """Data files below the data roots, then those that were fetched from hubs."""
    for name, path in _below([settings.home / "data", *settings.data_roots], _is_data):
        with suppress(OSError):
            yield CatalogEntry(name, str(path), path.stat().st_size)
    for stored in _whole(settings, data=True):
        if stored.path.suffix in FILE_SUFFIXES:
            yield CatalogEntry(str(stored.reference), str(stored.path), stored.size_bytes)


def _whole(settings: Settings, *, data: bool) -> Iterator[Stored]:
    return (stored for stored in settings.hub_folder.stored(data=data) if stored.whole)


def _below(roots: Sequence[Path], wanted: Callable[[Path], bool]) -> Iterator[tuple[str, Path]]:
    """Name and path of what is wanted; a name that an earlier root has, too, is given as the absolute path."""
    named: set[str] = set()
    for root in (root.absolute() for root in roots):
        for path in islice(_walk(root, MAX_DEPTH, wanted), MAX_VISITED):
            if wanted(path):
                name = path.relative_to(root).as_posix()
                yield (str(path) if name in named else name), path
                named.add(name)


def _walk(folder: Path, depth: int, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """Everything below, by name, but what is hidden and what lies in something wanted. Links are not followed further down."""
    with suppress(OSError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            path = Path(entry.path)
            yield path
            if depth > 1 and entry.is_dir(follow_symlinks=False) and not wanted(path):
                yield from _walk(path, depth - 1, wanted)


def _is_model(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _is_data(path: Path) -> bool:
    return path.suffix in FILE_SUFFIXES and path.is_file()


def _architecture(path: Path) -> str:
    try:
        named = read_json(path / CONFIG).get("architectures")
    except ModelError:
        return ""
    return str(named[0])[:100] if isinstance(named, list) and named else ""
