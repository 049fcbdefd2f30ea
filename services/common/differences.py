"""Differences between two documents of JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

MISSING: Final = object()
"""Stands for a value where one of the documents has no such field."""


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field that differs, in order: its path (`algorithm.clip_ratio_high`) and both values."""
    for name in {**one, **other}:
        a, b = one.get(name, MISSING), other.get(name, MISSING)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{name}.")
        elif a is MISSING or b is MISSING or a != b:
            yield f"{prefix}{name}", a, b
