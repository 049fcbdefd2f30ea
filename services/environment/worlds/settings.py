"""Settings that environments share: numbers within bounds, and the part of the tasks. Held-out tasks are never those of training."""

from __future__ import annotations

from typing import Literal

Part = Literal["all", "train", "held_out"]
_EVERY = 5
"""One number of so many is held out."""


def is_in(number: int, part: Part) -> bool:
    """Whether the task with this number belongs to the part."""
    return part == "all" or (number % _EVERY == 0) is (part == "held_out")


def require_part(part: str) -> None:
    """Raises ValueError for another word."""
    if part not in ("all", "train", "held_out"):
        raise ValueError(f"part must be all, train or held_out, not {part!r}")


def require_whole(name: str, value: object, least: int, most: int) -> None:
    """Raises ValueError for a setting that is no whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be {least} to {most}, not {value}")


def require_seconds(name: str, value: object, most: float = 3600.0) -> None:
    """Raises ValueError for a setting that is no number of seconds from 0.1 on."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= most:
        raise ValueError(f"{name} must be 0.1 to {most:g} seconds, not {value}")


def require_text(name: str, value: object) -> None:
    """Raises ValueError for a setting that is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, not {value}")  # noqa: TRY004  as of any other wrong value
