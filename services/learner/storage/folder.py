"""Names of the files that the learner adds to a job's own folder (`services.common.jobs.folder`)."""

import errno
import shutil
from pathlib import Path

ERROR_FILE = "error.txt"
"""What the first rank that failed said."""

FENCED_FILE = "fenced.txt"
"""Why a head had to end: a newer one runs the job."""

METRICS_DIR = "metrics"
"""Rank 0's metrics, which the agent serves."""

LOCK_FILE = "lock"
"""Held by the process that writes the folder."""

LINEAGE_FILE = "lineage.json"
"""Where each lineage of the job began."""

JOURNAL_DIR = "journal"


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
