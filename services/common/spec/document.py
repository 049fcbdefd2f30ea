"""Documents: the text of a job spec, JSON or YAML 1.2, as plain values, within bounds against hostile texts.

YAML is read by the core schema of version 1.2: `1e-5` is a number; `on`, `no`, `1:30` and dates are texts; `0123` is 123. The output of
`dump_document` has the same values in YAML 1.1 and 1.2. Older releases wrote YAML 1.1 (`parse_recorded`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Hashable, Iterator
from typing import Any, NoReturn

import yaml

from services.common.errors import ConfigError

MAX_VALUES = 20_000
"""Scalars, lists and mappings of a document together; a spec has about a hundred."""
MAX_DEPTH = 64
MAX_SCALAR_CHARS = 131_072
"""Twice the longest text that a spec allows."""
MAX_DIGITS = 64
"""Of an integer."""
MAX_DIRECTIVES = 8

_ParserBase: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DumperBase: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str"))
_CORE = {
    _NULL: (re.compile(r"(?:null|Null|NULL|~|)\Z"), ("n", "N", "~", "")),
    _BOOL: (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), tuple("tTfF")),
    _INT: (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), tuple("-+0123456789")),
    _FLOAT: (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        tuple("-+0123456789."),
    ),
}
"""Tag → (pattern of its plain scalars, their first characters), tried in this order: https://yaml.org/spec/1.2.2/#103-core-schema."""

_DIRECTIVE = re.compile(r"(?:\A|[\r\n\x85\u2028\u2029])%")


class CoreLoader(_ParserBase):  # type: ignore[misc]  # C where PyYAML has it
    """PyYAML's safe loader with the core schema's scalars; other tags, keys that are not plain values and duplicate keys are errors."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as in the base
    yaml_constructors: dict[str | None, Any] = {}  # noqa: RUF012

    def construct_core(self, node: yaml.ScalarNode) -> bool | int | float | None:
        """The value of a null, bool, int or float."""
        text = self.construct_scalar(node)
        if not _CORE[node.tag][0].match(text):  # an explicit tag: `!!int "1:30"`
            raise _error(f"{text[:80]!r} is no {node.tag.removeprefix(_TAG)}", node)
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return bool(text.lower() == "true")
        return _integer(text) if node.tag == _INT else float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))

    def construct_unique(self, node: yaml.MappingNode) -> Iterator[dict[Any, Any]]:
        """The value of a mapping, whose keys must differ."""
        found: dict[Any, Any] = {}
        yield found
        if not isinstance(node, yaml.MappingNode):
            raise _error("is no mapping", node)
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _error("a key must be a plain value", key_node)
            if key in found:
                raise _error(f"key {key!r} is given twice", key_node)
            found[key] = self.construct_object(value_node)

    def refuse(self, node: yaml.Node) -> NoReturn:
        """Raises for a tag that no JSON value has."""
        raise _error(f"the tag {node.tag.replace(_TAG, '!!')[:80]!r} is not accepted", node)


class PlainDumper(_DumperBase):  # type: ignore[misc]
    """PyYAML's safe dumper, which quotes texts that either version of YAML would read as something else."""


for _tag, (_pattern, _first) in _CORE.items():
    CoreLoader.add_implicit_resolver(_tag, _pattern, _first)
    CoreLoader.add_constructor(_tag, CoreLoader.construct_core)
    PlainDumper.add_implicit_resolver(_tag, _pattern, _first)
CoreLoader.add_constructor(_STR, CoreLoader.construct_yaml_str)
CoreLoader.add_constructor(f"{_TAG}seq", CoreLoader.construct_yaml_seq)
CoreLoader.add_constructor(f"{_TAG}map", CoreLoader.construct_unique)
CoreLoader.add_constructor(None, CoreLoader.refuse)


def parse_yaml(text: str | bytes) -> object:
    """The one document in a YAML text. Raises ConfigError, with the line, when it is invalid or beyond the bounds."""
    text = _decoded(text)
    try:
        _check_bounds(text)
        return yaml.load(text, Loader=CoreLoader)  # noqa: S506  a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid YAML: {_line_of(error)}") from error


def parse_json(text: str | bytes) -> object:
    """The value in a JSON text. Raises ConfigError when it is not JSON, or beyond the bounds."""
    text = _decoded(text)
    try:
        value = json.loads(text, parse_constant=no_constant, parse_int=_integer, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid JSON: {error}") from error
    _check_values(value)
    return value


def parse_document(text: str | bytes) -> object:
    """The value in a JSON or YAML text. Raises ConfigError when it is neither, or beyond the bounds."""
    text = _decoded(text)
    if text.lstrip().startswith(("{", "[")):  # YAML reads JSON's surrogate pairs as two characters
        with contextlib.suppress(ConfigError):
            return parse_json(text)
    return parse_yaml(text)


def parse_recorded(text: str | bytes) -> object:
    """The value in any release's own text, read as YAML 1.1: `1e5` and `08` are texts. Raises ConfigError."""
    try:
        return yaml.load(_decoded(text), Loader=_ParserBase)  # noqa: S506  a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid YAML: {_line_of(error)}") from error


def dump_document(value: object) -> str:
    """The value as YAML, keys in their given order."""
    return str(yaml.dump(value, Dumper=PlainDumper, sort_keys=False, allow_unicode=True))


def _check_bounds(text: str) -> None:
    """Checks the bounds on the parser's events, which are cheap, before any value is built."""
    if sum(1 for _ in _DIRECTIVE.finditer(text)) > MAX_DIRECTIVES:  # libyaml compares each with all earlier ones
        raise ConfigError(f"has more than {MAX_DIRECTIVES} lines that begin with `%`, YAML's mark of a directive")
    depth = count = 0
    for event in yaml.parse(text, Loader=_ParserBase):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"YAML aliases (`*name`, line {line}) are not accepted: write the value out")
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if not isinstance(event, yaml.NodeEvent):
            continue
        count += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        if count > MAX_VALUES:
            raise ConfigError(f"has more than {MAX_VALUES} values (line {line})")
        if depth > MAX_DEPTH:
            raise ConfigError(f"is nested more than {MAX_DEPTH} deep (line {line})")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR_CHARS:
            raise ConfigError(f"has a text of more than {MAX_SCALAR_CHARS} characters (line {line})")


def _check_values(value: object) -> None:
    """The same bounds for values that exist already."""
    count, pending = 0, [(value, 1)]
    while pending:
        item, depth = pending.pop()
        count += 1
        if isinstance(item, dict):
            count += len(item)  # its keys
            _check_texts(item)
            pending.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            pending.extend((inner, depth + 1) for inner in item)
        else:
            _check_texts((item,))
        if count > MAX_VALUES:
            raise ConfigError(f"has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH and isinstance(item, dict | list):
            raise ConfigError(f"is nested more than {MAX_DEPTH} deep")


def _check_texts(values: Any) -> None:  # noqa: ANN401  any JSON values
    if any(isinstance(value, str) and len(value) > MAX_SCALAR_CHARS for value in values):
        raise ConfigError(f"has a text of more than {MAX_SCALAR_CHARS} characters")


def _decoded(text: str | bytes) -> str:
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not valid UTF-8: {error.reason} at byte {error.start}") from error


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def no_constant(name: str) -> NoReturn:
    """Raises ValueError for NaN and infinities, which Python's parser would accept."""
    raise ValueError(f"{name} is not a JSON number")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice")
        found[key] = value
    return found


def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _line_of(error: Exception) -> str:
    """The error in one line, with the number of the line that causes it."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if problem is not None and mark is not None:
        message = ": ".join(part for part in (getattr(error, "context", None), problem) if part)
        return f"{message} (line {mark.line + 1})"
    return " ".join(str(error).split())[:300]
