"""A rank that computes the script, or a real one; head, journal, checkpoints and publisher are the real ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from services.learner import backends, rank
from services.learner.storage import lock
from services.learner.weights import publisher
from tests.chaos import failpoints
from tests.chaos.entry import tamper
from tests.chaos.scripted import trainer
from tests.chaos.stack import BLIND, GOOD, REAL

if __name__ == "__main__":
    if REAL not in os.environ or os.environ["MILLRACE_JOB"].startswith(GOOD):
        sys.modules["services.learner.training.trainer"] = trainer
        vars(backends)["open_backend"] = lambda *_: None  # Megatron is not there
    else:
        failpoints.install("training", Path(os.environ["MILLRACE_HOME"]) / "chaos")
    if BLIND in os.environ:
        vars(rank)["die_with_parent"] = lambda *_: None
        vars(lock)["_locked"] = lambda _handle: True  # as where the lock of a machine that was cut off has lapsed
    tamper("rank")
    publisher.PROCESS_MODULE = "tests.chaos.entry.weights"
    rank.main()
