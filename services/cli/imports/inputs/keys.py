"""Keys: a configuration as dotted keys with their values, and OmegaConf's references between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from services.cli.imports.settings import OpenText
from services.common.errors import ConfigError
from services.common.spec.document import parse_yaml

MAX_BYTES = 1_000_000
"""Of a configuration or a script."""
MAX_REFERENCES = 16
"""References that lead from one to the next."""
_REFERENCE = re.compile(r"\$\{(?:(oc\.select|oc\.env):)?([^${}:,]+)(?:,([^${}]*|\{\}))?\}")


def read_text(path: Path) -> str:
    """The file's text. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_BYTES} bytes")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not valid UTF-8: {error.reason} at byte {error.start}") from error


def read_yaml(path: Path) -> dict[str, object]:
    """Dotted key → value of a YAML file, in its order; `1e-6` is a number, as OmegaConf reads it. Raises ConfigError."""
    try:
        document = parse_yaml(read_text(path))
    except ConfigError as error:
        raise error if str(error).startswith(str(path)) else ConfigError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping, not {type(document).__name__}")
    return dict(flat(document))


def flat(values: Mapping[Any, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key → value of nested mappings; lists and empty mappings are values."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def resolve(
    given: Mapping[str, object], defaults: Mapping[str, object], environment: Mapping[str, str]
) -> dict[str, object]:
    """The values with OmegaConf's references replaced: `${data.x}`, `${.x}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}`.

    A text with a reference that leads nowhere becomes an OpenText.
    """

    def look_up(key: str, resolver: str | None, path: str, default: str | None) -> object:
        if resolver == "oc.env":
            return environment.get(path, default)
        parent = key.rpartition(".")[0]
        absolute = f"{parent}{path}" if path.startswith(".") else path
        found = given.get(absolute, defaults.get(absolute))
        return default if found is None else found

    return {key: _replaced(key, value, look_up) for key, value in given.items()}


def _replaced(key: str, value: object, look_up: Callable[[str, str | None, str, str | None], object]) -> object:
    for _ in range(MAX_REFERENCES):
        if not isinstance(value, str) or isinstance(value, OpenText) or not (match := _REFERENCE.search(value)):
            break
        resolver, path, default = match.groups()
        found = look_up(key, resolver, path.strip(), None if default is None else default.strip())
        if found is None and default is None:
            return OpenText(value)
        whole = match.group() == value
        value = found if whole else value.replace(match.group(), str(found))
    if isinstance(value, str) and "${" in value:
        return OpenText(value)
    return value
