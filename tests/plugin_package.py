"""Installs a package of plug-ins into a folder, which only processes find that get its environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path


def install(site: Path, name: str, points: Mapping[str, Sequence[str]], *modules: Path) -> dict[str, str]:
    """Puts copies of the modules into `site`, as package `name` with these entry points, group → `name = module:object`.

    Returns the environment variables of processes that find it.
    """
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    for module in modules:
        shutil.copy(module, site)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, offered in points.items() for line in (f"[{group}]", *offered)]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": os.pathsep.join(part for part in (str(site), os.environ.get("PYTHONPATH")) if part)}
