"""Prometheus metrics of the learner's agent itself. The ranks' are in `metrics`, which the agent must not import: it serves their files."""

from __future__ import annotations

import shutil
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Gauge


def export_disk(jobs: Path, registry: CollectorRegistry = REGISTRY) -> None:
    """Shows, at each scrape, how much room the volume has that holds the jobs' folder, which is made if it is missing."""
    jobs.mkdir(parents=True, exist_ok=True)
    free = Gauge("millrace_learner_disk_free_bytes", "Room left for journals and checkpoints.", registry=registry)
    size = Gauge("millrace_learner_disk_size_bytes", "Size of the volume that they lie on.", registry=registry)
    free.set_function(lambda: shutil.disk_usage(jobs).free)
    size.set_function(lambda: shutil.disk_usage(jobs).total)
