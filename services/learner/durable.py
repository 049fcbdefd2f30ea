"""Files that are there whole or not at all, whatever happens in between; and disks that are full."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file beside the old one, fsyncs it and puts it in the old one's place."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: OSError) -> bool:
    """Whether a write failed for want of space: on the disk, in a quota, or within a limit of file sizes."""
    return error.errno in _FULL


def require_space(folder: Path, needed_bytes: int) -> None:
    """Makes sure that the folder's volume has room.

    Raises:
        OSError: ENOSPC, with both figures.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        mib = 1 << 20
        text = f"No space left on device: {needed_bytes / mib:.1f} MiB needed, {free / mib:.1f} MiB free"
        raise OSError(errno.ENOSPC, text, str(folder))
