"""Document of a job to submit: a mapping or a YAML or JSON file, with settings changed, and families of such documents."""

from __future__ import annotations

import copy
import itertools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.records import JsonObject
from services.common.errors import ConfigError

Spec = Mapping[str, Any] | str | os.PathLike[str]
"""A job's settings, or the path of their YAML or JSON file."""
Overrides = Mapping[str, Any]
"""Dotted path → value. Example: {"learner.lr": 1e-6}"""


def make_document(spec: Spec, overrides: Overrides | None = None, tags: Sequence[str] = ()) -> JsonObject:
    """A new document with the overrides set and the tags added; the gateway validates its keys. Raises ConfigError."""
    if isinstance(spec, Mapping):
        name, folder, document = "the job", Path(), copy.deepcopy(dict(spec))
    else:
        name, folder, document = str(spec), Path(spec).parent, read_mapping(Path(spec), "`model` and `data`")
    for path, value in (overrides or {}).items():
        set_value(document, path, copy.deepcopy(value))
    if tags:
        document["tags"] = [*(document.get("tags") or ()), *tags]
    return complete(document, folder, name)


def complete(document: JsonObject, folder: Path, name: str) -> JsonObject:
    """The document, ready to be sent: a .jinja file that `model.chat_template` names, from `folder` on, becomes its text.

    Raises ConfigError, which begins with `name`, where it has a value that JSON cannot carry.
    """
    _read_chat_template(document, folder)
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: has a value that JSON cannot carry: {error}") from error
    return document


def _read_chat_template(document: JsonObject, folder: Path) -> None:
    model = document.get("model")
    name = model.get("chat_template") if isinstance(model, dict) else None
    if isinstance(model, dict) and isinstance(name, str) and name.endswith(".jinja"):
        try:
            model["chat_template"] = (folder / name).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}", field="model.chat_template") from error


def read_mapping(path: Path, needed: str) -> JsonObject:
    """The mapping in a YAML or JSON file; `needed`: its most important keys, for the error. Raises ConfigError, which names the file."""
    from services.common.spec.document import parse_document

    try:
        document = parse_document(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping with {needed}, not {type(document).__name__}")
    return document


def set_value(document: JsonObject, path: str, value: object) -> None:
    """Sets one value, by its dotted path (`learner.lr`), and creates missing sections.

    Raises ConfigError unless the path leads through sections only.
    """
    keys = path.split(".")
    if not all(keys):
        raise ConfigError(f"{path!r} is no dotted path such as learner.steps")
    section = document
    for depth, key in enumerate(keys[:-1], 1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {'.'.join(keys[:depth])} is not a section")
    section[keys[-1]] = value


def sweep(document: JsonObject, choices: Mapping[str, Sequence[Any]]) -> list[JsonObject]:
    """A document for each combination of values, all with one tag more, `sweep:<name>-<random>`.

    `choices`: dotted path → values. Example: {"learner.lr": [1e-6, 3e-6]}. Raises ConfigError for a setting without values.
    """
    for path, values in choices.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"{path}: a sweep needs a list of values, e.g. [1e-6, 3e-6]")
    family = f"sweep:{document.get('name', 'job')}-{secrets.token_hex(2)}"
    found = []
    for values in itertools.product(*choices.values()):
        made = copy.deepcopy(document)
        for path, value in zip(choices, values, strict=True):
            set_value(made, path, copy.deepcopy(value))
        found.append(made | {"tags": [*(made.get("tags") or ()), family]})
    return found
