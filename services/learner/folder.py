"""Names of the files in a job's own folder, `<home>/jobs/<job>/`."""

SPEC_FILE = "spec.yaml"
"""The resolved spec, every default written out."""

ERROR_FILE = "error.txt"
"""What the first rank that failed said."""

METRICS_DIR = "metrics"
"""Rank 0's metrics, which the agent serves."""
