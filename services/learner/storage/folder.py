"""Names of the files that the learner adds to a job's own folder (`services.common.jobs.folder`), and the folder's free space."""

import errno
import shutil
from pathlib import Path

ERROR_FILE = "error.txt"
"""The error of the rank that failed first."""
FENCED_FILE = "fenced.txt"
"""The reason why a head had to end: a newer one runs the job."""
METRICS_DIR = "metrics"
"""Rank 0's metrics, which the agent serves."""
LOCK_FILE = "lock"
"""Locked by the process that writes the folder."""
LINEAGE_FILE = "lineage.json"
"""The step at which each lineage of the job began."""
JOURNAL_DIR = "journal"


def is_full(error: OSError) -> bool:
    """Whether a write failed for lack of space: on the disk, in a quota, or within a limit of file sizes."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def require_space(folder: Path, needed_bytes: int) -> None:
    """Checks that the folder's volume has this much free; OSError (ENOSPC) names both figures."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        mib = 1 << 20
        text = f"No space left on device: {needed_bytes / mib:.1f} MiB needed, {free / mib:.1f} MiB free"
        raise OSError(errno.ENOSPC, text, str(folder))
