"""Words of a shell script: its commands one after the other, each word with its variables and arithmetic replaced.

A part that only running the script would give, such as `$(date)` or `$1`, stays as it is written and makes the word an OpenText.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from services.cli.imports.inputs.arithmetic import calculate
from services.cli.imports.settings import OpenText

KEYWORDS = frozenset(
    {
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "for",
        "while",
        "until",
        "do",
        "done",
        "case",
        "esac",
        "function",
        "{",
        "}",
        "!",
    }
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_BRACED = re.compile(
    r"(?P<name>\w+|[@*])(?:\[(?P<index>[@*])\])?(?P<change>,,|\^\^)?(?:(?P<operator>:?[-=+?])(?P<word>.*))?\Z",
    re.DOTALL,
)
_SEPARATORS = "\n;&|()"


@dataclass(frozen=True, slots=True)
class Word:
    """One word, before it is split into arguments."""

    texts: tuple[str, ...]
    """Arguments that it gives: one, or several from a list or from blanks in an unquoted variable, or none."""
    quoted: bool = False

    @property
    def keyword(self) -> str | None:
        """The word when it stands there without quotes."""
        return self.texts[0] if len(self.texts) == 1 and not self.quoted else None


@dataclass(slots=True)
class Variables:
    """The shell's variables: of the script, and behind them of the environment."""

    environment: Mapping[str, str]
    values: dict[str, list[str]] = field(default_factory=dict)

    def get(self, name: str) -> list[str] | None:
        """The elements of a list, or the one text; None when it is not set."""
        if name in self.values:
            return self.values[name]
        return [self.environment[name]] if name in self.environment else None


@dataclass(slots=True)
class _Piece:
    """Part of a word."""

    texts: list[str]
    quoted: bool


class Reader:
    """Reads the commands of a script in their order. The variables may change between two commands."""

    def __init__(self, text: str, variables: Variables) -> None:
        parts = text.replace("\r\n", "\n").split("\\\n")
        self.text, self.at, self.variables = "".join(parts), 0, variables
        self._joins = list(accumulate(len(part) for part in parts[:-1]))
        self._heredocs: list[str] = []

    @property
    def line(self) -> int:
        """Number of the line here, from 1."""
        return self.text.count("\n", 0, self.at) + bisect_right(self._joins, self.at) + 1

    @property
    def ended(self) -> bool:
        """Whether the script has no more commands."""
        return self.at >= len(self.text)

    def command(self) -> list[Word]:
        """The words of the next command, without redirections; empty between commands. A keyword at the start is a command of its own."""
        words: list[Word] = []
        while not self.ended:
            character = self.text[self.at]
            if character in " \t\r":
                self.at += 1
            elif character == "#":
                self._skip_line()
            elif character in _SEPARATORS:
                self._separator()
                return words
            elif character in "<>":
                self._redirection(words)
            else:
                words.append(self._assignment() or self.word())
                if len(words) == 1 and words[0].keyword in KEYWORDS:
                    return words
        return words

    def peek(self) -> str:
        """The next character."""
        return self.text[self.at : self.at + 1]

    def pattern(self) -> str | None:
        """The next pattern of a `case`, up to its bracket; None at `esac`."""
        match = re.compile(r"[\s;]*(?:#[^\n]*\n\s*)*(?:(esac)\b|\(?([^()\n]*)\))").match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return None if match[1] else match[2]

    def word(self) -> Word:
        """The word here, expanded."""
        pieces: list[_Piece] = []
        while not self.ended and (character := self.text[self.at]) not in f" \t\r<>{_SEPARATORS}":
            if character == "'":
                end = self._find("'", self.at + 1)
                pieces.append(_Piece([self.text[self.at + 1 : end]], quoted=True))
                self.at = end + 1
            elif character == '"':
                pieces += self._double_quoted()
            elif character == "\\":
                pieces.append(_Piece([self.text[self.at + 1 : self.at + 2]], quoted=True))
                self.at += 2
            elif character in "$`":
                pieces.append(_Piece(self._expansion(), quoted=False) if character == "$" else self._backquoted())
            else:
                start = self.at
                while not self.ended and self.text[self.at] not in f" \t\r<>'\"\\$`{_SEPARATORS}":
                    self.at += 1
                pieces.append(_Piece([self.text[start : self.at]], quoted=True))
        quoted = any(piece.quoted and piece.texts == [""] for piece in pieces)
        literal = re.match(r"[^'\"\\$`]*\Z", "".join(text for piece in pieces for text in piece.texts)) is not None
        return Word(_joined(pieces, keep_empty=quoted), quoted=not (literal and len(pieces) == 1))

    def expand(self, text: str) -> str:
        """A text in which variables are replaced and quotes are taken away, as in the default of a variable."""
        inner = Reader(text[1:-1] if text[:1] == text[-1:] == "'" and len(text) > 1 else text, self.variables)
        pieces: list[_Piece] = []
        while not inner.ended:
            if inner.peek() == '"':
                inner.at += 1
            else:
                pieces.append(inner.quoted_piece('"'))
        return _text([part for piece in pieces for part in piece.texts])

    def quoted_piece(self, end: str) -> _Piece:
        """The next part of a text in double quotes, which end with `end`."""
        character = self.text[self.at]
        if character == "$":
            return _Piece(self._expansion(), quoted=True)
        if character == "`":
            return self._backquoted()
        if character == "\\" and self.text[self.at + 1 : self.at + 2] in set('$`"\\'):
            self.at += 2
            return _Piece([self.text[self.at - 1]], quoted=True)
        start = self.at
        self.at += 1
        while not self.ended and self.text[self.at] not in f"$`\\{end}":
            self.at += 1
        return _Piece([self.text[start : self.at]], quoted=True)

    def _double_quoted(self) -> list[_Piece]:
        self.at += 1
        pieces = [_Piece([""], quoted=True)]
        while not self.ended and self.text[self.at] != '"':
            pieces.append(self.quoted_piece('"'))
        self.at += 1
        if len(pieces) == 2 and not pieces[1].texts:  # "${LIST[@]}" of an empty list, and "$@"
            return [pieces[1]]
        return pieces

    def _backquoted(self) -> _Piece:
        end = self._find("`", self.at + 1)
        text, self.at = self.text[self.at : end + 1], end + 1
        return _Piece([OpenText(text)], quoted=True)

    def _expansion(self) -> list[str]:
        """The texts of what `$` begins here."""
        start = self.at
        if self.text.startswith("$((", start):
            end = self._closing("(", ")")
            number = calculate(self.text[start + 3 : end - 2], self._number)
            return [OpenText(self.text[start:end]) if number is None else str(number)]
        if self.text.startswith("$(", start):
            return [OpenText(self.text[start : self._closing("(", ")")])]
        if self.text.startswith("${", start):
            end = self._closing("{", "}")
            return self._braced(self.text[start + 2 : end - 1])
        self.at += 1
        match = _NAME.match(self.text, self.at)
        name = match.group() if match else self.text[self.at : self.at + 1]
        if not match and (not name or name not in "@*#?!$-0123456789"):
            return ["$"]
        self.at += len(name)
        return self._braced(name)

    def _braced(self, text: str) -> list[str]:
        match = _BRACED.match(text)
        if match is None:
            return [OpenText(f"${{{text}}}")]
        name, operator = match["name"], match["operator"] or ""
        if name in {"@", "*"}:
            return []
        found = self.variables.get(name)
        missing = found is None or (":" in operator and not "".join(found))
        if operator.endswith(("-", "=")):
            texts = [self.expand(match["word"])] if missing else found or []
            if missing and operator.endswith("="):
                self.variables.values[name] = texts
        elif operator.endswith("+"):
            texts = [] if missing else [self.expand(match["word"])]
        elif found is None:
            texts = [] if match["index"] else [OpenText(f"${{{text}}}")]
        else:
            texts = found if match["index"] else found[:1]
        return [_changed(part, match["change"]) for part in texts]

    def _number(self, name: str) -> str | None:
        found = self.variables.get(name.lstrip("$").strip("{}"))
        return None if not found or isinstance(found[0], OpenText) else found[0]

    def _assignment(self) -> Word | None:
        """`NAME=(…)`, whose elements may be on several lines: a word of the name, then the elements."""
        match = re.compile(rf"({_ASSIGNMENT.pattern})\(").match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        texts: list[str] = []
        while not self.ended and self.text[self.at] != ")":
            if self.text[self.at] == "#":
                self._skip_line()
            elif self.text[self.at] in f" \t\r<>{_SEPARATORS}":
                self.at += 1
            else:
                texts += self.word().texts
        self.at += 1
        return Word((f"{match[1]}(", *texts), quoted=True)

    def _separator(self) -> None:
        newline = self.text[self.at] == "\n"
        self.at += 1
        if newline and self._heredocs:
            for end in self._heredocs:
                match = re.compile(rf"^\t*{end}$", re.MULTILINE).search(self.text, self.at)
                self.at = len(self.text) if match is None else match.end()
            self._heredocs.clear()

    def _redirection(self, words: list[Word]) -> None:
        """`2>&1`, `> file`, `<<EOF`: no argument."""
        if self.text[self.at - 1].isdigit() and words and (words[-1].keyword or "").isdigit():
            words.pop()
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc:
            self._heredocs.append(heredoc[2])
            self.at = heredoc.end()
            return
        while self.peek() and self.peek() in "<>&| \t":
            self.at += 1
        self.word()

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _find(self, character: str, start: int) -> int:
        end = self.text.find(character, start)
        return len(self.text) if end < 0 else end

    def _closing(self, opening: str, closing: str) -> int:
        """Goes behind the bracket that closes the first one here, over quotes."""
        depth, quote = 0, ""
        while not self.ended:
            character = self.text[self.at]
            self.at += 1
            if quote:
                quote = "" if character == quote else quote
            elif character == "\\":
                self.at += 1
            elif character in "'\"":
                quote = character
            elif character in opening + closing:
                depth += 1 if character == opening else -1
                if depth == 0:
                    break
        return self.at


def _changed(text: str, change: str | None) -> str:
    if change is None or isinstance(text, OpenText):
        return text
    return text.lower() if change == ",," else text.upper()


def _text(parts: list[str]) -> str:
    kind: Callable[[str], str] = OpenText if any(isinstance(part, OpenText) for part in parts) else str
    return kind("".join(parts))


def _joined(pieces: list[_Piece], *, keep_empty: bool) -> tuple[str, ...]:
    """The arguments that pieces give: lists and the blanks of unquoted variables divide."""
    found: list[list[str]] = [[]]
    for piece in pieces:
        parts = piece.texts if piece.quoted else [part for text in piece.texts for part in _split(text)]
        for index, part in enumerate(parts):
            if index:
                found.append([])
            found[-1].append(part)
    return tuple(_text(parts) for parts in found if parts or (keep_empty and len(found) == 1))


def _split(text: str) -> list[str]:
    return [text] if isinstance(text, OpenText) else text.split()
