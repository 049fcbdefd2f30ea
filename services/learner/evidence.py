"""What a job's folder holds for those who look at it afterwards; nothing is written, and a part that is damaged is told, not raised."""

from __future__ import annotations

from pathlib import Path

from services.common.checkpoint_manifest import CHECKPOINTS_DIR, Checkpoint, read_manifest, verify_files
from services.common.errors import MillraceError


def sound_checkpoints(folder: Path) -> tuple[dict[int, Checkpoint], dict[Path, str]]:
    """The checkpoints of which every file verifies, by step; and why each other one cannot be used: recovery passes those over."""
    found: dict[int, Checkpoint] = {}
    damaged: dict[Path, str] = {}
    for path in finished_checkpoints(folder):
        try:
            checkpoint = read_manifest(path)
            verify_files(checkpoint)
        except (MillraceError, OSError) as error:
            if path.is_dir():  # else it was pruned, or replaced, while it was read
                damaged[path] = f"a checkpoint that cannot be used: {error}"
        else:
            found[checkpoint.step] = checkpoint
    return found, damaged


def finished_checkpoints(folder: Path) -> list[Path]:
    """The directories of all that were committed, oldest first."""
    return sorted((folder / CHECKPOINTS_DIR).glob("step-????????"))
