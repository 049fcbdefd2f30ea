"""Locks of several machines in one file: what deploy/lock/resolve.py makes of what was resolved for each."""

from __future__ import annotations

import re

import pytest
from packaging.markers import Marker

from deploy.lock.resolve import ENVIRONMENTS, LOCK, Environment, marker, merged

ARM, X86 = ([each for each in ENVIRONMENTS if each.machine == machine] for machine in ("aarch64", "x86_64"))


def evaluated(text: str, environment: Environment) -> bool:
    variables = {"python_version": environment.python, "platform_machine": environment.machine}
    return not text or Marker(text.removeprefix(" ; ")).evaluate(variables)


@pytest.mark.parametrize(
    "where", [ENVIRONMENTS, ARM, X86, ENVIRONMENTS[:1], [each for each in ENVIRONMENTS if each.python == "3.12"]]
)
def test_a_marker_holds_where_the_package_is_needed_and_nowhere_else(where: list[Environment]) -> None:
    text = marker(set(where))
    assert [each for each in ENVIRONMENTS if evaluated(text, each)] == where


def test_a_package_has_one_version_everywhere() -> None:
    with pytest.raises(SystemExit, match=r"numpy has the versions 1\.26\.4, 2\.3\.5"):
        merged({each: {"numpy": "2.3.5" if each in X86 else "1.26.4"} for each in ENVIRONMENTS})


def test_torch_is_the_build_for_cpus_on_every_machine() -> None:
    assert merged({each: {"torch": "2.13.0"} for each in ENVIRONMENTS}) == ["torch==2.13.0+cpu"]


def test_the_locks_are_what_it_writes() -> None:
    """One line a package: its version, and at most a marker of these environments."""
    for file in ("cpu", "gateway", "reward", "environment", "rollout", "learner", "unit"):
        lines = LOCK.with_name(f"{file}.txt").read_text().splitlines()
        names = [line.partition("==")[0] for line in lines]
        assert names == sorted(set(names))
        markers = {line.partition(" ; ")[2] for line in lines}
        assert all(any(evaluated(text, each) for each in ENVIRONMENTS) for text in markers)
        assert all(re.fullmatch(r"[a-z0-9-]+==[^ ;]+( ; .+)?", line) for line in lines)
