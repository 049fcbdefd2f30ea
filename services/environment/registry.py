"""Environments that are there, by name: those that come along, then those that installed packages offer. Imported in a child only."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module

from services.common.config import plugins
from services.common.errors import ConfigError, EnvironmentUnavailable, did_you_mean
from services.environment.base import Environment


class World(StrEnum):
    """The environments that Millrace includes (services/environment/worlds/)."""

    GUESS_NUMBER = "guess_number"
    CALCULATOR = "calculator"
    PYTHON = "python"
    TEXTARENA = "textarena"
    OPENENV = "openenv"


def available() -> list[str]:
    """Names of all."""
    return plugins.available(plugins.ENVIRONMENTS, World)


def make(name: str, config: dict[str, object]) -> Environment:
    """An environment with these settings.

    Raises:
        ConfigError: there is none of this name, it cannot be imported, or it refuses the settings; names it.
        EnvironmentUnavailable: it says so.
    """
    kind = load(name)
    try:
        made: Environment = kind(**config)
    except EnvironmentUnavailable:
        raise
    except Exception as error:
        raise ConfigError(f"environment {name} refuses its config: {type(error).__name__}: {error}") from error
    if missing := [method for method in ("reset", "step", "close") if not callable(getattr(made, method, None))]:
        raise ConfigError(f"environment {name} has no method {missing[0]}")
    return made


def load(name: str) -> type:
    """The class of an environment. Raises ConfigError when there is none of this name, or it cannot be imported."""
    if name in set(World):
        found: type = import_module(f"services.environment.worlds.{name}").ENVIRONMENT
        return found
    known = available()
    if name not in known:
        raise ConfigError(f"there is no environment {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    try:
        loaded: type = plugins.offered(plugins.ENVIRONMENTS)[name].load()
    except Exception as error:
        raise ConfigError(f"environment {name} cannot be imported: {type(error).__name__}: {error}") from error
    return loaded
