"""Documents of files: a job to submit, with its `--set key.path=value` changes, and other settings."""

from __future__ import annotations

import copy
import itertools
import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.spec.document import parse_document


def load_job(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The document of a YAML or JSON file, with the changes applied; the gateway validates its keys. Raises ConfigError."""
    document = read_mapping(path, "`model` and `data`")
    apply_changes(document, changes)
    _read_chat_template(document, path.parent)
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: has a value that JSON cannot carry: {error}") from error
    return document


def _read_chat_template(document: dict[str, Any], folder: Path) -> None:
    """Puts the text of a .jinja file that `model.chat_template` names, from this folder on, in its place. Raises ConfigError."""
    model = document.get("model")
    name = model.get("chat_template") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(name, str) and name.endswith(".jinja"):
        try:
            model["chat_template"] = (folder / name).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}", field="model.chat_template") from error


def swept(document: dict[str, Any], sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """A document for each combination of values, all with one tag more, `sweep:<name>-<random>`.

    `sweeps`: each `key.path=value,value`, e.g. `learner.lr=1e-6,3e-6`. Raises ConfigError for any other form, and for a key given twice.
    """
    choices: list[list[str]] = []
    for sweep in sweeps:
        path, sign, text = sweep.partition("=")
        try:
            values = parse_document(f"[{text}]")
        except ConfigError as error:
            raise ConfigError(f"--sweep {sweep}: the values {error}") from error
        if not sign or not isinstance(values, list) or not values:
            raise ConfigError(f"--sweep {sweep}: must look like learner.lr=1e-6,3e-6")
        choices.append([f"{path}={json.dumps(value)}" for value in values])
    paths = [sweep.partition("=")[0].strip() for sweep in sweeps]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--sweep: {', '.join(paths)}: each setting once")
    family = f"sweep:{document.get('name', 'job')}-{secrets.token_hex(2)}"
    found = []
    for changes in itertools.product(*choices):
        made = copy.deepcopy(document)
        apply_changes(made, changes)
        found.append(made | {"tags": [*made.get("tags", []), family]})
    return found


def read_mapping(path: Path, needed: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; `needed`: its most important keys, for the error. Raises ConfigError, which names the file."""
    try:
        document = parse_document(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping with {needed}, not {type(document).__name__}")
    return document


def apply_changes(document: dict[str, Any], changes: Iterable[str]) -> None:
    """`apply_change` for each, in order."""
    for change in changes:
        apply_change(document, change)


def apply_change(document: dict[str, Any], change: str) -> None:
    """Sets one value, e.g. `learner.lr=3e-4` or `reward.verifiers={"*": math}`, and creates missing sections.

    Raises ConfigError unless it has the form key.path=value, and the path leads through sections only.
    """
    path, sign, text = change.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ConfigError(f"--set {change}: must look like learner.steps=100")
    section = document
    for depth, key in enumerate(keys[:-1], 1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {change}: {'.'.join(keys[:depth])} is not a section")
    try:
        section[keys[-1]] = parse_document(text)
    except ConfigError as error:
        raise ConfigError(f"--set {change}: the value {error}") from error
