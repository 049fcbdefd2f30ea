"""Registry of verifiers by name. Only worker processes use it: the imports are heavy and the code may be foreign."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from services.common.config.verifiers import ENTRY_POINT_GROUP, BuiltIn
from services.common.errors import VerifierError
from services.reward.verifiers.base import Verifier

_MODULES = {
    BuiltIn.MATH: "mathematics",
    BuiltIn.DAPO_MATH: "dapo_math",
    BuiltIn.GSM8K: "gsm8k",
    BuiltIn.REASONING_GYM: "procedural",
}


@cache
def offered() -> dict[str, EntryPoint]:
    """Verifiers of installed packages, by name, not imported. Reads the metadata of every installed package."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def load(name: str) -> Verifier:
    """The verifier of this name: built-in, else of an installed package. Raises VerifierError when there is none, or its import fails."""
    try:
        if name in _MODULES:
            module = importlib.import_module(f"services.reward.verifiers.{_MODULES[BuiltIn(name)]}")
            return cast("Verifier", module.verify)
        if name in offered():
            return cast("Verifier", offered()[name].load())
    except (ImportError, AttributeError) as error:
        raise VerifierError(f"verifier {name!r} cannot be loaded: {error}") from error
    raise VerifierError(f"there is no verifier {name!r} on this server")
