"""A rank that computes the script, or a real one; head, journal, checkpoints and publisher are the real ones."""

from __future__ import annotations

import os
import sys

from services.common.config.settings import Platform
from services.learner import rank
from services.learner.megatron import platform
from services.learner.storage import lock
from services.learner.weights import publisher
from tests.chaos.entry import tamper
from tests.chaos.scripted import trainer
from tests.chaos.stack import BLIND, GOOD, REAL

prepare_platform = platform.prepare


def prepare(chosen: Platform) -> None:
    """As the real one; then the modules of the training step can be imported, and get their fail points."""
    prepare_platform(chosen)
    tamper("training")


if __name__ == "__main__":
    if REAL not in os.environ or os.environ["MILLRACE_JOB"].startswith(GOOD):
        sys.modules["services.learner.megatron.trainer"] = trainer
        platform.prepare = lambda *_, **__: None  # it adapts Megatron, which is not there
    else:
        platform.prepare = prepare
    if BLIND in os.environ:
        vars(rank)["die_with_parent"] = lambda *_: None
        vars(lock)["_locked"] = lambda _handle: True  # as where the lock of a machine that was cut off has lapsed
    tamper("rank")
    publisher.PROCESS_MODULE = "tests.chaos.entry.weights"
    rank.main()
