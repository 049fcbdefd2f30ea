"""Overrides of a document on the command line: `--set key.path=value` and `--sweep key.path=value,value`, with values as in YAML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from millrace.document import complete, read_mapping, set_value, sweep
from services.common.errors import ConfigError
from services.common.spec.document import parse_document


def load_job(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The document of a YAML or JSON file, with the changes applied; the gateway validates its keys. Raises ConfigError."""
    document = read_mapping(path, "`model` and `data`")
    apply_changes(document, changes)
    return complete(document, path.parent, str(path))


def swept(document: dict[str, Any], sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """A document for each combination of values, all with one tag more, `sweep:<name>-<random>`.

    `sweeps`: each `key.path=value,value`, e.g. `learner.lr=1e-6,3e-6`. Raises ConfigError for any other form, and for a key given twice.
    """
    choices: dict[str, list[Any]] = {}
    for text in sweeps:
        path, sign, listed = text.partition("=")
        try:
            values = parse_document(f"[{listed}]")
        except ConfigError as error:
            raise ConfigError(f"--sweep {text}: the values {error}") from error
        if not sign or not isinstance(values, list) or not values:
            raise ConfigError(f"--sweep {text}: must look like learner.lr=1e-6,3e-6")
        if path.strip() in choices:
            raise ConfigError(f"--sweep {text}: each setting once")
        choices[path.strip()] = values
    return sweep(document, choices)


def apply_changes(document: dict[str, Any], changes: Iterable[str]) -> None:
    """`apply_change` for each, in order."""
    for change in changes:
        apply_change(document, change)


def apply_change(document: dict[str, Any], change: str) -> None:
    """Sets one value, e.g. `learner.lr=3e-4` or `reward.verifiers={"*": math}`, and creates missing sections.

    Raises ConfigError unless it has the form key.path=value, and the path leads through sections only.
    """
    path, sign, text = change.partition("=")
    if not sign:
        raise ConfigError(f"--set {change}: must look like learner.steps=100")
    try:
        value = parse_document(text)
    except ConfigError as error:
        raise ConfigError(f"--set {change}: the value {error}") from error
    try:
        set_value(document, path.strip(), value)
    except ConfigError as error:
        raise ConfigError(f"--set {change}: {error}") from error
