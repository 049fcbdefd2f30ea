"""Document of an import: the job spec as YAML, each field with the key that it comes from."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from services.cli.imports.result import FieldValue
from services.common.spec.document import dump_document

ORDER = (
    "name", "model", "data", "rollout", "reward", "algorithm", "learner", "critic", "reference", "off_policy", "checkpoint", "eval",
)  # fmt: skip
"""Sections, in the order of the spec."""
_COLUMN = 46
"""Comments begin here, or after a longer value."""


def nested(fields: Mapping[str, FieldValue]) -> dict[str, Any]:
    """The fields as the mapping that the YAML text has, sections in the spec's order. A section without fields may be a field itself."""
    found: dict[str, Any] = {}
    for name in sorted(fields, key=lambda name: ORDER.index(name.partition(".")[0])):
        *sections, last = name.split(".")
        inside = found
        for section in sections:
            inside = inside.setdefault(section, {})
        value = fields[name].value
        inside.setdefault(last, dict(value) if isinstance(value, dict) else value)
    return found


def write(fields: Mapping[str, FieldValue], heading: str, given: Container[str]) -> str:
    """The YAML text; `heading` is its first comment. A key that is not `given` is marked as a default of the source."""
    fields = {
        name: replace(field, keys=tuple(_marked(key, given) for key in field.keys)) for name, field in fields.items()
    }
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    return "\n".join([*lines, *_section(nested(fields), fields, ())]) + "\n"


def _marked(key: str, given: Container[str]) -> str:
    return key if key in given or key.startswith("--") else f"{key} (default)"


def _section(values: Mapping[str, Any], fields: Mapping[str, FieldValue], path: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for key, value in values.items():
        name, indent = ".".join((*path, key)), "  " * len(path)
        inner = any(other.startswith(f"{name}.") for other in fields)
        if inner and isinstance(value, dict):
            lines += [f"{indent}{key}:", *_section(value, fields, (*path, key))]
        else:
            lines += _leaf(indent, key, value, fields[name])
    return lines


def _leaf(indent: str, key: str, value: object, field: FieldValue) -> list[str]:
    text = [f"{indent}{line}" for line in dump_document({key: value}).splitlines()]
    comment = f"# {'; '.join(part for part in (', '.join(field.keys), field.comment) if part)}"
    if comment == "# ":
        return text
    if len(text) > 1:
        return [f"{indent}{comment}", *text]
    return [f"{text[0]:<{_COLUMN - 1}} {comment}"]
