"""The head's bookkeeping starts without torch: only what computes on tokens imports it."""

from __future__ import annotations

import subprocess
import sys

LIGHT = (
    "services.learner.groups.buffer",
    "services.learner.groups.off_policy",
    "services.learner.groups.ledger",
    "services.learner.groups.evaluation",
    "services.learner.algorithms.advantages",
    "services.learner.algorithms.advantages",
    "services.learner.algorithms.advantages",
    "services.learner.audit.files",
    "services.learner.replay.run",
    "services.learner.replay.plan",
)


def test_bookkeeping_imports_no_torch() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'megatron', 'transformers'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
