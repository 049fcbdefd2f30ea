"""Paths named in a job: they must lie below the directories that the operator allows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from services.common.errors import ConfigError


def locate(name: str, roots: Sequence[Path], *, field: str, error: type[ConfigError]) -> Path:
    """The real path of a name below the allowed directories, links resolved, whether it exists or not.

    A relative name is searched below each root in turn; the first path that exists wins, else the first root's is returned.
    The error has the class `error` and names `field`, the setting that holds the name.

    Raises:
        error: the name has `..` or a NUL in it, is not a usable path, or leads (perhaps by a link) outside the roots.
    """
    if ".." in PurePosixPath(name).parts or "\0" in name:
        raise error(f"{name!r} must not contain `..` or a NUL character", field=field)
    real_roots = [resolve(root, field=field, error=error) for root in roots]
    candidates = [resolve(root / name, field=field, error=error) for root in real_roots]
    chosen = next((path for path in candidates if os.path.exists(path)), candidates[0])  # noqa: PTH110  False on any OSError
    if not is_below(chosen, real_roots):
        listed = ", ".join(str(root) for root in real_roots)
        raise error(f"{name!r} leads outside the allowed directories ({listed})", field=field)
    try:
        chosen.exists()
    except OSError as problem:  # the name is too long, or a directory may not be searched
        raise error(f"{name[:200]!r} is not a usable path: {problem.strerror}", field=field) from problem
    return chosen


def resolve(path: Path, *, field: str, error: type[ConfigError]) -> Path:
    """The absolute path with every link followed. Raises `error` for a loop, or a path that the system rejects."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as problem:
        raise error(f"{path} is not a usable path: {problem}", field=field) from problem


def is_below(path: Path, roots: Iterable[Path]) -> bool:
    """Whether a resolved path lies strictly below one of the resolved roots."""
    return any(path != root and path.is_relative_to(root) for root in roots)
