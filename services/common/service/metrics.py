"""Process metrics of every service, beside prometheus_client's own `process_…`: its release, and the memory of its process tree.

The engine, the ranks and the verifiers run in descendants of the process that serves /metrics; its own resident memory is a small part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.service.host import installed_version


class ProcessMetrics(Collector):
    """Collector that reads the process tree at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample of each metric."""
        info = GaugeMetricFamily("millrace_build_info", "1, with the release that runs.", labels=["version"])
        info.add_metric([release()], 1)
        yield info
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        yield GaugeMetricFamily(
            "millrace_process_tree_memory_bytes",
            "Memory of this process and all below it; pages that several share are counted once.",
            sum(map(_memory_bytes, processes)),
        )


def _memory_bytes(process: psutil.Process) -> int:
    """Proportional set size; resident set size where the system does not report it; 0 of a process that has just ended."""
    with suppress(psutil.NoSuchProcess):
        try:
            full = process.memory_full_info()
            return int(getattr(full, "pss", 0) or full.rss)
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
    return 0


def release() -> str:
    """The installed package's version; `unknown` in a source tree that is not installed."""
    return installed_version("millrace") or "unknown"
