"""Package of the chaos suite's world: its installation, and the notes of what the world did."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests import plugin_package
from tests.chaos.worlds.world import NAME

FOLDER = "CHAOS_FOLDER"
"""Environment variable of the children: the folder of fail points and notes. They do not get the service's own variables."""


def install(home: Path) -> dict[str, str]:
    """Puts the world into a package; the environment of a stack in `home` that finds it."""
    points = {"millrace.environments": [f"{NAME} = tests.chaos.worlds.plugin:World"]}
    return plugin_package.install(home / "site", "chaos-worlds", points) | {FOLDER: str(home / "chaos")}


def note_deed(folder: Path, deed: str, seed: int) -> None:
    """Notes what is about to be done. One write for each: the process may not live to flush a file."""
    descriptor = os.open(folder / "deeds", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{deed} {seed}\n".encode())
    os.close(descriptor)


def deeds_of(folder: Path) -> Counter[tuple[str, int]]:
    """How often each deed was done, by deed and seed."""
    path = folder / "deeds"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((deed, int(seed)) for deed, _, seed in (line.rpartition(" ") for line in lines))
