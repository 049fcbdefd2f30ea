"""Rules: the kinds of entries that a source's tables have, and how they are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from services.cli.imports.draft import Draft
from services.cli.imports.settings import DELETED, MISSING, Settings


class Kind(StrEnum):
    """How a value is read; the names of `Settings`' methods."""

    NUMBER = "number"
    INTEGER = "integer"
    TRUTH = "truth"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Field:
    """A key that is a field of the spec under another name."""

    name: str
    """`learner.weight_decay`."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key for which Millrace has one value only."""

    values: tuple[object, ...]
    """Values with which the job does the same."""
    same: str
    """Why it is left out then."""
    other: str
    """What the job does instead of any other value."""


Derivation = Callable[[Settings, Draft], None]
"""Sets the fields that depend on several keys, and accounts for these keys."""


@dataclass(frozen=True, slots=True)
class Source:
    """Another trainer's configuration, as data."""

    name: str
    """Trainer and version that the tables describe."""
    defaults: Mapping[str, object]
    """The trainer's defaults of keys that matter."""
    fields: Mapping[str, Field]
    fixed: Mapping[str, Fixed]
    derivations: Sequence[Derivation]
    differing: Mapping[str, str]
    """Pattern of keys → what the job does instead of what they say; unless they are null or empty."""
    left_out: Mapping[str, str]
    """Pattern of keys → why they are left out; `*` stands for any text, dots included. The first that matches counts."""


def translate(source: Source, settings: Settings) -> Draft:
    """The draft that a source's tables make of these settings; keys that no table has get no line, and are unknown."""
    draft = Draft(settings)
    for key, rule in source.fields.items():
        value = getattr(settings, rule.kind)(key)
        if value is not None:
            draft.set(rule.name, value, key)
        elif key in settings.given:
            draft.leave(key, "not set")
    for key, fixed in source.fixed.items():
        _compare(fixed, key, settings, draft)
    for derive in source.derivations:
        derive(settings, draft)
    for key, value in settings.given.items():
        if key.startswith(DELETED):
            draft.leave(key, "deleted, and with it its default")
        elif not draft.has_line(key):
            _match(source, key, value, draft)
        elif settings.is_open(key):
            draft.differ(key, _why_open(value))
    return draft


def _compare(fixed: Fixed, key: str, settings: Settings, draft: Draft) -> None:
    value = settings.value(key)
    if key not in settings.given and key not in settings.defaults:
        return
    if value is None or _plain(value) in map(_plain, fixed.values):
        draft.leave(key, fixed.same)
    else:
        draft.differ(key, fixed.other)


def _match(source: Source, key: str, value: object, draft: Draft) -> None:
    if (reason := _reason(source.differing, key)) and value not in (None, {}, []):
        draft.differ(key, reason)
    elif reason := reason or _reason(source.left_out, key):
        draft.leave(key, reason)


def _plain(value: object) -> object:
    """Numbers compare as numbers, texts without case, as `1` with `1.0`, and `True` with `true`."""
    return str(value).lower() if isinstance(value, bool | str | list | dict) else value


def _why_open(value: object) -> str:
    return "no value is given" if value in {MISSING, ""} else "only running the script would give the value"


def _reason(patterns: Mapping[str, str], key: str) -> str:
    return next((reason for pattern, reason in patterns.items() if fnmatchcase(key, pattern)), "")
