"""Report of an import, as text: one line for each key."""

from __future__ import annotations

from services.cli.imports.result import Imported, Outcome


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
