"""Puts the odd environments into a package of their own, which only the children find that get its environment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def install(folder: Path) -> dict[str, str]:
    """The environment of children that have them installed, under `odd` and `missing`."""
    metadata = folder / "odd_worlds-1.0.dist-info"
    metadata.mkdir()
    shutil.copy(Path(__file__).with_name("odd_worlds.py"), folder)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-worlds\nVersion: 1.0\n")
    points = ["odd = odd_worlds:Odd", "missing = odd_worlds:Nowhere"]
    (metadata / "entry_points.txt").write_text("\n".join(["[millrace.environments]", *points]) + "\n")
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH")) if part)
    return {"PYTHONPATH": path}
