"""A service's memory is that of its whole process tree."""

from __future__ import annotations

import subprocess
import sys
import time

from prometheus_client import CollectorRegistry

from services.common.service.metrics import ProcessMetrics

HELD_BYTES = 200 * 1024 * 1024


def tree_bytes(registry: CollectorRegistry) -> float:
    value = registry.get_sample_value("millrace_process_tree_memory_bytes")
    assert value is not None
    return value


def test_memory_of_processes_below_is_counted_and_gone_with_them() -> None:
    registry = CollectorRegistry()
    ProcessMetrics(registry)
    before = tree_bytes(registry)
    assert before > 1024 * 1024
    held = f"import sys; held = b'x' * {HELD_BYTES}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_bytes(registry) > before + 0.9 * HELD_BYTES
    time.sleep(0.05)
    assert tree_bytes(registry) < before + 0.5 * HELD_BYTES


def test_the_release_is_told() -> None:
    registry = CollectorRegistry()
    ProcessMetrics(registry)
    (family,) = [family for family in registry.collect() if family.name == "millrace_build_info"]
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["version"]
