"""Plug-ins: the functions that installed packages offer, by name, so that gateway and learner check a job without importing one.

entry-point group ── names, from the packages' metadata ──► check of a job ── in the process that needs it ──► import
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from services.common.errors import ConfigError, Problem
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator, LossName

VERIFIERS = "millrace.verifiers"
"""Entry-point group of verifiers (services/reward/verifiers/base.py)."""
ADVANTAGES = "millrace.advantages"
"""Entry-point group of advantage estimators (services/learner/algorithms/plugins.py)."""
LOSSES = "millrace.losses"
"""Entry-point group of token losses (services/learner/algorithms/plugins.py)."""
ENVIRONMENTS = "millrace.environments"
"""Entry-point group of environments (services/environment/base.py)."""
DATA_HANDLERS = "millrace.data_handlers"
"""Entry-point group of data handlers (services/cli/prepare/handlers.py)."""


@cache
def offered(group: str) -> Mapping[str, EntryPoint]:
    """What installed packages offer in an entry-point group, by name, not imported. Reads the metadata of every installed package."""
    return MappingProxyType({point.name: point for point in entry_points(group=group)})


def available(group: str, built_in: Iterable[str]) -> list[str]:
    """Names of all: the built-in ones, then the installed ones. A package cannot take a built-in name."""
    own = list(built_in)
    return [*own, *sorted(offered(group).keys() - set(own))]


def check_installed(algorithm: AlgorithmSpec) -> None:
    """Checks the names of section `algorithm`. Raises ConfigError with every wrong one, its field and those that exist."""
    problems = [
        *_missing("advantage_estimator", algorithm.advantage_estimator, ADVANTAGES, AdvantageEstimator),
        *_missing("loss", algorithm.loss, LOSSES, LossName),
    ]
    if problems:
        raise ConfigError(*problems)


def _missing(field: str, name: str, group: str, built_in: type[StrEnum]) -> list[Problem]:
    known = available(group, built_in)
    if name in known:
        return []
    return [Problem(f"algorithm.{field}", f"there is no {field} {name!r}; there are {', '.join(known)}")]
