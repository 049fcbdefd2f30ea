"""Puts the odd environments into a package of their own, which only the children find that get its environment."""

from __future__ import annotations

from pathlib import Path

from tests import plugin_package


def install(folder: Path) -> dict[str, str]:
    """The environment of children that have them installed, under `odd` and `missing`."""
    points = {"millrace.environments": ["odd = odd_worlds:Odd", "missing = odd_worlds:Nowhere"]}
    return plugin_package.install(folder, "odd-worlds", points, Path(__file__).with_name("odd_worlds.py"))
