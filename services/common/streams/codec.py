"""Codec of the streams: MessagePack of what `types` defines, decoded with limits and full validation. Never pickle."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError

from services.common.errors import EntryError
from services.common.streams.limits import MIN_ENTRY_BYTES, check_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

MAX_LEVELS = 500
"""Levels of nesting within `extra_info`."""


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


@cache
def _names(kind: type[DataclassInstance]) -> tuple[tuple[str, bool, Any], ...]:
    """Name of each field, whether it is left out where it has its default, and that."""
    return tuple((each.name, "later" in each.metadata, each.default) for each in fields(kind))


def _values(value: DataclassInstance) -> dict[str, Any]:
    """The fields of one dataclass, for MessagePack, which calls this again for those within: `asdict` copies every value besides."""
    values = {
        name: getattr(value, name)
        for name, later, default in _names(type(value))
        if not later or getattr(value, name) != default
    }
    for name in ("extra_info", "config"):
        if name in values:
            _require_levels(values[name], MAX_LEVELS)
    return values


def _require_levels(value: Any, left: int) -> None:  # noqa: ANN401  JSON values
    """Raises ValueError when dictionaries and lists are nested deeper than so many levels."""
    if not isinstance(value, dict | list | tuple):
        return
    if not left:
        raise ValueError(f"nested deeper than {MAX_LEVELS} levels")
    for each in value.values() if isinstance(value, dict) else value:
        _require_levels(each, left - 1)


def encode(value: DataclassInstance, limit_bytes: int) -> bytes:
    """One stream entry's payload; `limit_bytes`: of the job (`limits.entry_limit`).

    Raises:
        EntryError: the payload would exceed the limit, or MessagePack has no form for a value in `extra_info` (one nested
            deeper than MAX_LEVELS: a task could be read with more, but not within its group).
    """
    try:
        payload: bytes = msgpack.packb(value, default=_values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise EntryError(f"{type(value).__name__} cannot be encoded: {type(error).__name__}: {error}") from error
    if len(payload) > limit_bytes:
        raise EntryError(f"{type(value).__name__} of {len(payload)} bytes exceeds the entry limit of {limit_bytes}")
    return payload


def decode(kind: type[T], payload: bytes, limit_bytes: int) -> T:
    """The typed value in a payload of at most `limit_bytes`, the job's limit (`limits.entry_limit`).

    Raises:
        EntryError: it is larger, which is found before anything is decoded, or no `kind`; then the first wrong field is named.
    """
    if len(payload) > limit_bytes:
        raise EntryError(f"entry of {len(payload)} bytes exceeds the limit of {limit_bytes}")
    if len(payload) > MIN_ENTRY_BYTES:
        check_values(payload)
    try:
        document = msgpack.unpackb(payload, raw=False, strict_map_key=True, use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        detail = f": {error}" if str(error) else ""
        raise EntryError(f"not MessagePack: {type(error).__name__}{detail}") from error
    try:
        value: T = _adapter(kind).validate_python(document)
    except (ValidationError, RecursionError) as error:
        raise EntryError(f"not a valid {kind.__name__}: {_first_error(error)}") from error
    return value


def _first_error(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'entry'}: {first['msg']}"
