"""Script: the overrides of the call of verl's trainer in a shell script. Nothing is run.

Assignments, `export`, lists, `case` and `if` with plain tests are followed in their order, with the environment's variables behind the
script's own. What is not followed (loops, functions, other conditions) is noted.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from services.cli.imports.inputs.words import Reader, Variables, Word
from services.cli.imports.settings import OpenText
from services.common.errors import ConfigError

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)\Z", re.DOTALL)
_MODULE = re.compile(r"(?:verl|recipe)(?:\.\w+)*\.(?!main_(?:generation|eval))\w*main\w*\Z")
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_NAME_FLAGS, _PATH_FLAGS = (
    frozenset({"--config-name", "-cn"}),
    frozenset({"--config-path", "-cp", "--config-dir", "-cd"}),
)
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")
_ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "function": "}", "{": "}"}


@dataclass(slots=True)
class Call:
    """The call of a trainer."""

    module: str
    """`verl.trainer.main_ppo`."""
    overrides: list[str] = field(default_factory=list)
    """An OpenText where a part of its value is not known."""
    config_name: str = ""
    """Of `--config-name`, without its suffix."""
    notes: list[str] = field(default_factory=list)
    """What was not followed or not used."""


def read_call(text: str, environment: Mapping[str, str]) -> Call:
    """The first call of verl's trainer in a script. Raises ConfigError when there is none."""
    run = _Run(Reader(text, Variables(environment)))
    run.block(frozenset())
    if run.call is None:
        wanted = "no call of verl's trainer is found, such as `python3 -m verl.trainer.main_ppo key=value …`"
        raise ConfigError("; ".join([wanted, *run.notes]))
    run.call.notes = run.notes
    return run.call


class _Run:
    """Follows a script's commands."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.variables = reader, reader.variables
        self.call: Call | None = None
        self.notes: list[str] = []

    def block(self, ends: frozenset[str], *, active: bool = True) -> str:
        """Follows commands up to one of the keywords `ends`, which it returns; if not `active`, only passes over them."""
        while not self.reader.ended:
            words = self.reader.command()
            keyword = words[0].keyword if words else None
            if keyword in ends:
                return str(keyword)
            if keyword == "case":
                self._case(active=active)
            elif keyword == "if":
                self._if(active=active)
            elif keyword in _ENDS:
                self._pass_over(str(keyword), active=active)
            elif active and words:
                self._simple(words)
            if not self.reader.ended and ";;" in ends and self.reader.text.startswith(";", self.reader.at):
                return ";;"
        return ""

    def _case(self, *, active: bool) -> None:
        line = self.reader.line
        value = self.reader.command()[0].texts
        subject = value[0] if value else ""
        self._skip_word("in")
        known = active and not isinstance(subject, OpenText)
        if active and not known:
            self.notes.append(f"line {line}: `case {subject}` is not followed")
        done = False
        while (pattern := self.reader.pattern()) is not None:
            choices = [self.reader.expand(part.strip().strip("\"'")) for part in pattern.split("|")]
            chosen = known and not done and any(fnmatchcase(subject, choice) for choice in choices)
            done = done or chosen
            if self.block(frozenset({";;", "esac"}), active=chosen) == "esac":
                return

    def _skip_word(self, word: str) -> None:
        found = re.compile(rf"\s*{word}\b").match(self.reader.text, self.reader.at)
        if found:
            self.reader.at = found.end()

    def _if(self, *, active: bool) -> None:
        open_branch = active
        end = "if"
        while end in {"if", "elif"}:
            line = self.reader.line
            holds = self._condition() if open_branch else False
            if not open_branch:
                self.block(frozenset({"then"}), active=False)
            if holds is None:
                self.notes.append(
                    f"line {line}: the condition of `if` is not known, and none of its branches is followed"
                )
                open_branch = False
            end = self.block(frozenset({"elif", "else", "fi"}), active=bool(holds))
            open_branch = open_branch and not holds
        if end == "else":
            self.block(frozenset({"fi"}), active=open_branch)

    def _condition(self) -> bool | None:
        commands = []
        while not self.reader.ended:
            words = self.reader.command()
            if words and words[0].keyword == "then":
                break
            if words:
                commands.append([text for word in words for text in (word.texts or ("",))])
        return _test(commands[0]) if len(commands) == 1 else None

    def _pass_over(self, keyword: str, *, active: bool) -> None:
        if active:
            self.notes.append(f"line {self.reader.line}: `{keyword}` is not followed")
        if keyword == "function":
            self.block(frozenset({"{"}), active=False)
        self.block(frozenset({_ENDS[keyword]}), active=False)

    def _simple(self, words: list[Word]) -> None:
        if words[0].keyword in _DECLARING:
            words = words[1:]
        texts = [word.texts for word in words]
        if all(_is_assignment(word) for word in texts):
            for word in texts:
                self._assign(word)
            return
        arguments = [text for word in texts for text in word]
        at = next(
            (index for index, text in enumerate(arguments) if _MODULE.match(text) and "-m" in arguments[:index]), None
        )
        if at is None:
            return
        if self.call is not None:
            self.notes.append(f"line {self.reader.line}: another call, of {arguments[at]}, is not used")
            return
        self.call = Call(arguments[at])
        self._take(self.call, arguments[at + 1 :])

    def _assign(self, texts: tuple[str, ...]) -> None:
        match = _ASSIGNMENT.match(texts[0]) if texts else None
        if match is None:
            return
        name, listed = match["name"], match["value"] == "(" and texts[0].endswith("=(")
        new = (
            list(texts[1:])
            if listed
            else [OpenText(match["value"]) if isinstance(texts[0], OpenText) else match["value"]]
        )
        before = (self.variables.get(name) or []) if match["more"] else []
        if not listed and before:
            kind = OpenText if isinstance(new[0], OpenText) or isinstance(before[0], OpenText) else str
            new = [kind(before[0] + new[0]), *before[1:]]
        self.variables.values[name] = before + new if listed else new

    def _take(self, call: Call, arguments: list[str]) -> None:
        while arguments:
            text = arguments.pop(0)
            flag, equals, value = text.partition("=")
            if flag in _NAME_FLAGS | _PATH_FLAGS:
                value = value if equals else (arguments.pop(0) if arguments else "")
                if flag in _NAME_FLAGS:
                    call.config_name = value.removesuffix(".yaml")
            elif text.startswith("-"):
                self.notes.append(f"the option {text} of the call is not used")
            elif isinstance(text, OpenText) and not equals:
                self.notes.append(f"the argument {text} of the call is not known, and not used")
            elif text.strip():
                call.overrides.append(text)


def _is_assignment(texts: tuple[str, ...]) -> bool:
    return bool(texts) and _ASSIGNMENT.match(texts[0]) is not None


def _test(arguments: list[str]) -> bool | None:
    """Whether `[ a = b ]` and its like hold; None when it is not known."""
    first, *rest = arguments
    if first not in {"[", "[[", "test"} or any(isinstance(text, OpenText) for text in rest):
        return None
    rest = rest if first == "test" else rest[:-1]
    if rest[:1] == ["!"]:
        inner = _compare(rest[1:], patterns=first == "[[")
        return None if inner is None else not inner
    return _compare(rest, patterns=first == "[[")


def _compare(arguments: list[str], *, patterns: bool) -> bool | None:
    """Whether a comparison of texts or integers holds; None when it is another. `patterns`: the right side is one."""
    match arguments:
        case ["-z" | "-n" as sign, text]:
            return bool(text) == (sign == "-n")
        case [left, "=" | "==" | "!=" as sign, right]:
            same = fnmatchcase(left, right) if patterns else left == right
            return same == (sign != "!=")
        case [left, sign, right] if sign in _COMPARISONS and _INTEGER.match(left) and _INTEGER.match(right):
            return _COMPARISONS[sign](int(left), int(right))
    return None
