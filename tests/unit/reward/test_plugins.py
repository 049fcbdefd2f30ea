"""Verifiers of installed packages: known by name everywhere, imported only in worker processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.common.config.verifiers import BuiltIn, available, choose_verifier
from services.common.spec.reward import RewardSpec

PRINT_LOADED = (
    "import sys; from services.common.config.verifiers import available; available();"
    "print([name for name in ('odd_verifiers', 'math_verify', 'sympy', 'reasoning_gym') if name in sys.modules])"
)


@pytest.mark.usefixtures("installed_here")
def test_installed_verifiers_are_offered_after_the_built_in_ones() -> None:
    names = available()
    assert names[: len(BuiltIn)] == list(BuiltIn)
    assert "odd_sleep" in names
    assert choose_verifier("anything", RewardSpec(verifiers={"*": "odd_sleep"})) == "odd_sleep"


@pytest.mark.usefixtures("installed_here")
def test_a_built_in_name_cannot_be_taken() -> None:
    assert available().count("gsm8k") == 1


def test_to_know_the_names_nothing_is_imported(plugins: dict[str, str]) -> None:
    out = subprocess.run([sys.executable, "-c", PRINT_LOADED], env=plugins, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
