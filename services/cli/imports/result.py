"""Result of an import: a job spec, and what became of every key; the report as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.common.errors import Problem


class Outcome(StrEnum):
    """What became of a key."""

    BECAME = "became"
    """One or more fields of the spec, with the same meaning."""
    LEFT_OUT = "left out"
    """Nothing: it has no effect on what is learned, or Millrace does the same without it."""
    DIFFERS = "differs"
    """Nothing, or a field with another meaning: the job does not do what the key says."""
    UNKNOWN = "unknown"
    """Nothing: it is no key of the source that is known here."""


@dataclass(frozen=True, slots=True)
class Line:
    """Report on one key."""

    key: str
    """Dotted, as in the source: `actor_rollout_ref.rollout.n`."""
    value: object
    outcome: Outcome
    text: str
    """`→ rollout.group_size: 5`, or why not."""
    fields: tuple[str, ...] = ()
    """Fields of the spec that it became, or is a part of."""

    def __str__(self) -> str:
        return f"{self.outcome:<9} {self.key}: {shown(self.value)}  {self.text}"


@dataclass(frozen=True, slots=True)
class FieldValue:
    """One field of the spec."""

    value: object
    keys: tuple[str, ...]
    """Keys that it comes from; none for a value that Millrace chooses."""
    comment: str


@dataclass(frozen=True, slots=True)
class Imported:
    """Job spec that an import has made, and the report on it."""

    source: str
    """Trainer and version: `verl 0.9.1`."""
    text: str
    """The spec, YAML with comments."""
    document: Mapping[str, object]
    """The same as values."""
    lines: tuple[Line, ...]
    """One for each key of the input, in its order."""
    defaults: tuple[Line, ...]
    """One for each default of the source that became a field or differs."""
    notes: tuple[str, ...] = ()
    """Parts of a shell script that were not followed."""
    problems: tuple[Problem, ...] = ()
    """Why the spec is not valid yet; none when it is."""

    def of(self, outcome: Outcome) -> list[Line]:
        """The lines of this outcome."""
        return [line for line in self.lines if line.outcome is outcome]


def shown(value: object, limit: int = 80) -> str:
    """A value in one short line, as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    listed = ", ".join(shown(item, limit) for item in value) if isinstance(value, list) else None
    text = f"[{listed}]" if listed is not None else " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def report(found: Imported) -> str:
    """The lines of the input's keys, those of the source's defaults, what was not followed, and the sums."""
    parts = [f"from {found.source}", *map(str, found.lines)]
    if found.defaults:
        parts += ["", f"defaults of {found.source} that count here", *map(str, found.defaults)]
    if found.notes:
        parts += ["", "not followed", *found.notes]
    if found.problems:
        parts += ["", "the spec is not valid yet", *map(str, found.problems)]
    return "\n".join([*parts, "", summary(found)]) + "\n"


def summary(found: Imported) -> str:
    """`39 keys: 20 became fields, 17 left out, 1 differs, 1 unknown (trainer.typo)`."""
    counts = {outcome: len(found.of(outcome)) for outcome in Outcome}
    named = ", ".join(line.key for line in found.of(Outcome.UNKNOWN))
    unknown = f", {counts[Outcome.UNKNOWN]} unknown ({named})" if named else ""
    shares = (
        f"{counts[Outcome.BECAME]} became fields, {counts[Outcome.LEFT_OUT]} left out, {counts[Outcome.DIFFERS]} differ"
    )
    return f"{len(found.lines)} keys: {shares}{unknown}"
