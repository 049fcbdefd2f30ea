"""Differences between documents of JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MISSING: Final = object()
"""Stands for a value where a document has no such field."""


def differing(documents: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every field in which not all documents agree, in order: its path (`algorithm.clip_ratio_high`) and the value in each."""
    for name in dict.fromkeys(name for document in documents for name in document):
        values = [document.get(name, MISSING) for document in documents]
        if all(isinstance(value, Mapping) for value in values):
            yield from differing(values, f"{prefix}{name}.")
        elif any(value != values[0] for value in values):
            yield f"{prefix}{name}", values


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Every field that differs, in order: its path and both values."""
    for path, (a, b) in differing([one, other]):
        yield path, a, b
