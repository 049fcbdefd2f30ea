"""Hydra's overrides: `key=value`, `+key=value`, `++key=value`, `~key` (https://hydra.cc/docs/advanced/override_grammar/basic/)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from services.cli.imports.inputs.keys import flat
from services.cli.imports.settings import DELETED, OpenText
from services.common.errors import ConfigError

_OVERRIDE = re.compile(r"(?P<sign>~|\+\+|\+|)(?P<key>[\w@:/-][\w.@:/-]*)(?:=(?P<value>.*))?\Z", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?\Z")
_WORDS = {"null": None, "true": True, "false": False}
MAX_DEPTH = 32
"""Of lists and mappings in a value."""


def is_override(text: str) -> bool:
    """Whether an argument is an override and not a file."""
    return text.startswith(("+", "~")) or "=" in text


def apply(overrides: Sequence[str], onto: Mapping[str, object]) -> dict[str, object]:
    """Dotted key → value after these overrides, in their order; the last one of a key wins. `~key` leaves a key of that name, with None.

    Raises ConfigError, which names the override.
    """
    found = dict(onto)
    for text in overrides:
        match = _OVERRIDE.match(text)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            raise ConfigError(f"override {text[:80]!r}: must look like key=value, +key=value, ++key=value or ~key")
        key = match["key"]
        if match["sign"] == "~":
            _forget(found, key)
            found[f"{DELETED}{key}"] = None
            continue
        value = OpenText(match["value"]) if isinstance(text, OpenText) else _value(match["value"], text)
        if isinstance(value, dict) and value:
            found |= dict(flat(value, f"{key}."))
        else:
            _forget(found, key)
            found[key] = value
    return found


def _forget(found: dict[str, object], key: str) -> None:
    """A new value of a section replaces its keys."""
    for other in [other for other in found if other == key or other.startswith(f"{key}.")]:
        del found[other]


def _value(text: str, override: str) -> object:
    parser = _Parser(text)
    try:
        return parser.whole()
    except ValueError as error:
        raise ConfigError(f"override {override[:80]!r}: {error}") from error


class _Parser:
    """Value of an override: a quoted text, a list, a mapping, or a word that may be a number, true, false or null."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def whole(self) -> object:
        """The value of the whole text; a comma outside brackets would be a sweep."""
        value = self.element(stop=",")
        if self.at < len(self.text):
            sweep = self.text[self.at] == ","
            raise ValueError(
                "a sweep of several values is not one job" if sweep else f"unexpected {self.text[self.at :][:20]!r}"
            )
        return value

    def element(self, stop: str) -> object:
        """The value here, up to one of the characters of `stop`."""
        self.blanks()
        first = self.text[self.at : self.at + 1]
        if first in {"'", '"'}:
            value: object = self.quoted(first)
        elif first in {"[", "{"}:
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise ValueError(f"is nested more than {MAX_DEPTH} deep")
            value = self.items() if first == "[" else self.pairs()
            self.depth -= 1
        else:
            return _typed(self.word(stop))
        self.blanks()
        return value

    def blanks(self) -> None:
        """Goes over blanks."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def quoted(self, quote: str) -> str:
        """The text between quotes, in which a backslash stands before a quote that belongs to it."""
        start, self.at, found = self.at, self.at + 1, ""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in {quote, "\\"}:
                found, self.at = found + self.text[self.at + 1], self.at + 2
                continue
            self.at += 1
            if character == quote:
                return found
            found += character
        raise ValueError(f"the quote {self.text[start:][:20]!r} does not end")

    def word(self, stop: str) -> str:
        """The characters up to `stop`; `${…}` is passed over."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in stop:
            end = self.text.find("}", self.at) if self.text.startswith("${", self.at) else -1
            self.at = end + 1 if end > 0 else self.at + 1
        return self.text[start : self.at].strip()

    def items(self) -> list[object]:
        """A list, at its bracket."""
        found: list[object] = []
        while not self.closes("]", empty=not found):
            found.append(self.element(",]"))
        return found

    def pairs(self) -> dict[object, object]:
        """A mapping, at its brace."""
        found: dict[object, object] = {}
        while not self.closes("}", empty=not found):
            key = self.element(":")
            if self.text[self.at : self.at + 1] != ":":
                raise ValueError("a mapping needs `key: value`")
            self.at += 1
            found[key] = self.element(",}")
        return found

    def closes(self, bracket: str, *, empty: bool) -> bool:
        """Goes over what opens, separates or closes; whether it was the end."""
        self.blanks()
        character = self.text[self.at : self.at + 1]
        if not character:
            raise ValueError(f"{bracket} is missing")
        if empty and character in "[{":
            self.at += 1
            self.blanks()
            if self.text[self.at : self.at + 1] != bracket:
                return False
            character = bracket
        if character not in {",", bracket}:
            raise ValueError(f"unexpected {self.text[self.at :][:20]!r}")
        self.at += 1
        return character == bracket


def _typed(word: str) -> object:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _INTEGER.match(word) and len(word) <= 64:
        return int(word)
    if _FLOAT.match(word):
        return float(word)
    return word
