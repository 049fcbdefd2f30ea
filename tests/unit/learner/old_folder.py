"""A job's folder of a release without environments and turns, and folders of today with the spec that it would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from services.common.jobs.folder import SPEC_FILE

RECORDED = Path(__file__).parent / "recorded" / "recorded-5ca3d1c6"
"""Seven steps of two groups of four rollouts, without checkpoints."""


def as_before_turns(folder: Path) -> None:
    """Takes all fields out of a job's spec that the release did not know; the journal of a job without environments has none."""
    path = folder / SPEC_FILE
    known = yaml.safe_load((RECORDED / SPEC_FILE).read_text())
    path.write_text(yaml.safe_dump(_only(yaml.safe_load(path.read_text()), known), sort_keys=False))


def _only(document: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The fields that the other document has, too; where that says nothing of a section's fields, all of them."""
    return {
        name: _only(value, known[name]) if isinstance(value, dict) and known[name] else value
        for name, value in document.items()
        if name in known
    }
