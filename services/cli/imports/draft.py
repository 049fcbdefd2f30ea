"""Draft of an import: the fields of the spec and the lines of the report, as they grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.cli.imports.result import FieldValue, Line, Outcome, shown
from services.cli.imports.settings import Settings

_STRONGER = (Outcome.LEFT_OUT, Outcome.BECAME, Outcome.DIFFERS)


@dataclass(slots=True)
class _Entry:
    """What is known of one key so far."""

    outcome: Outcome
    fields: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Draft:
    """Fields and lines of one import. A key has one line, however many fields it becomes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fields: dict[str, FieldValue] = {}
        self._entries: dict[str, _Entry] = {}

    def set(self, name: str, value: object, *keys: str, remark: str = "", fits: bool = True) -> None:
        """Sets a field of the spec, which these keys became; it `fits` when it has their meaning."""
        self.fields[name] = FieldValue(value, keys, remark)
        for key in keys:
            self._note(key, Outcome.BECAME if fits else Outcome.DIFFERS, remark, name)

    def leave(self, key: str, remark: str, *, fits: bool = True) -> None:
        """The key becomes nothing; nothing is lost by it when it `fits`."""
        self._note(key, Outcome.LEFT_OUT if fits else Outcome.DIFFERS, remark)

    def differ(self, key: str, remark: str) -> None:
        """The job does not do what the key says."""
        self._note(key, Outcome.DIFFERS, remark)

    def has_line(self, key: str) -> bool:
        """Whether the key is accounted for."""
        return key in self._entries

    def lines(self) -> tuple[Line, ...]:
        """One line for each key of the input, in its order."""
        return tuple(self._line(key, value) for key, value in self.settings.given.items())

    def default_lines(self) -> tuple[Line, ...]:
        """One line for each default of the source that became a field, or differs."""
        found = (self._line(key, value) for key, value in self.settings.defaults.items() if not self._is_input(key))
        return tuple(line for line in found if line.outcome in {Outcome.BECAME, Outcome.DIFFERS})

    def _is_input(self, key: str) -> bool:
        return key in self.settings.given

    def _note(self, key: str, outcome: Outcome, remark: str, name: str = "") -> None:
        entry = self._entries.setdefault(key, _Entry(outcome))
        entry.outcome = max(entry.outcome, outcome, key=_STRONGER.index)
        if name and name not in entry.fields:
            entry.fields.append(name)
        if remark and remark not in entry.remarks:
            entry.remarks.append(remark)

    def _line(self, key: str, value: object) -> Line:
        entry = self._entries.get(key)
        if entry is None:
            return Line(key, value, Outcome.UNKNOWN, "– not a key that is known here")
        became = ", ".join(f"{name}: {shown(self.fields[name].value)}" for name in entry.fields if name in self.fields)
        text = "; ".join(entry.remarks)
        if became:
            text = f"→ {became}{f' ({text})' if text else ''}"
        return Line(key, value, entry.outcome, text if became else f"– {text}", tuple(entry.fields))
