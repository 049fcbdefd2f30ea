"""What a job's folder holds for those who look at it afterwards; nothing is written, and a part that is damaged is told, not raised."""

from __future__ import annotations

from pathlib import Path

from services.common.checkpoint_manifest import CHECKPOINTS_DIR, Checkpoint, read_manifest, verify_files
from services.common.errors import MillraceError


def sound_checkpoints(folder: Path) -> tuple[dict[int, Checkpoint], list[str]]:
    """The checkpoints of which every file verifies, by step, and a remark for each other one: recovery passes those over."""
    found: dict[int, Checkpoint] = {}
    remarks = []
    for path in sorted((folder / CHECKPOINTS_DIR).glob("step-????????")):
        try:
            checkpoint = read_manifest(path)
            verify_files(checkpoint)
        except MillraceError as error:
            remarks.append(f"a checkpoint that cannot be used: {error}")
        else:
            found[checkpoint.step] = checkpoint
    return found, remarks
