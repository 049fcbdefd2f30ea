"""Settings of a source: the keys that the input gives, and the source's own defaults behind them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from services.common.errors import Problem

MISSING = "???"
"""OmegaConf's mark of a value that somebody else must give."""
DELETED = "~"
"""Before a key that an override deletes."""
_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*\Z")
_TRUE, _FALSE = frozenset({"true", "yes", "on"}), frozenset({"false", "no", "off"})


class OpenText(str):
    """A value that only running the script would give, as its text stands there: `$(date +%s)`."""

    __slots__ = ()


class Settings:
    """Values by dotted key. What cannot be read as the type that is asked for becomes a problem, named by its key."""

    def __init__(self, given: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        """`given` is the input, in its order; `defaults` the source's values of keys that matter."""
        self.given = dict(given)
        self.defaults = {key: value for key, value in defaults.items() if not self._replaces(key)}
        self.problems: list[Problem] = []

    def is_open(self, key: str) -> bool:
        """Whether the input names the key, but no value is known."""
        value = self.given.get(key)
        return isinstance(value, OpenText) or (isinstance(value, str) and value in {MISSING, ""})

    def _replaces(self, key: str) -> bool:
        return (key in self.given and not self.is_open(key)) or f"{DELETED}{key}" in self.given

    def is_given(self, key: str) -> bool:
        """Whether the input gives a value, other than null."""
        return self.given.get(key) is not None and not self.is_open(key)

    def value(self, key: str) -> object:
        """The value given, else the default, else None."""
        return self.given[key] if key in self.given and not self.is_open(key) else self.defaults.get(key)

    def first(self, *keys: str) -> str:
        """The first of these keys that the input gives, else the first with a default, else the first."""
        found = [key for key in keys if self.is_given(key)] or [key for key in keys if key in self.defaults]
        return (found or list(keys))[0]

    def number(self, key: str) -> float | None:
        """The value as a number."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and _NUMBER.match(value):
            return float(value)
        self._refuse(key, value, "a number")
        return None

    def integer(self, key: str) -> int | None:
        """The value as an integer; `5.0` is one."""
        value = self.number(key)
        if value is None:
            return None
        if math.isfinite(value) and value == int(value):
            return int(value)
        self._refuse(key, self.value(key), "an integer")
        return None

    def truth(self, key: str) -> bool | None:
        """The value as true or false; `yes`, `no`, `on` and `off` count as in YAML 1.1."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
        self._refuse(key, value, "true or false")
        return None

    def text(self, key: str) -> str | None:
        """The value as a text."""
        value = self.value(key)
        if isinstance(value, dict | list):
            self._refuse(key, value, "a text")
            return None
        return None if value is None else str(value)

    def items(self, key: str) -> list[object]:
        """The value as a list; a single value is a list of one."""
        value = self.value(key)
        if value is None:
            return []
        return list(value) if isinstance(value, list) else [value]

    def _refuse(self, key: str, value: object, wanted: str) -> None:
        problem = Problem(key, f"must be {wanted}, not {str(value)[:80]!r}")
        if problem not in self.problems:
            self.problems.append(problem)
