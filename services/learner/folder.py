"""Names of the files that the learner adds to a job's own folder (`services.common.job_folder`)."""

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
