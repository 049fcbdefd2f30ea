"""What a rank's process is told before Megatron is imported."""

from __future__ import annotations

import subprocess
import sys

_PAGES_OF_A_STEP = """
import resource
import torch
from services.common.config.settings import Platform
from services.learner.megatron.platform import prepare

{prepared}

def step():
    torch.ones(25_000_000)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _pages(prepared: str) -> int:
    code = _PAGES_OF_A_STEP.format(prepared=prepared)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_a_step_on_a_cpu_has_the_memory_that_the_one_before_it_freed() -> None:
    assert 4 * _pages("prepare(Platform.CPU)") < _pages("")
