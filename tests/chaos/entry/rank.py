"""A rank that computes the script; head, journal, checkpoints and publisher are the real ones."""

from __future__ import annotations

import sys

from services.learner import rank
from services.learner.megatron import platform
from tests.chaos.entry import tamper
from tests.chaos.scripted import trainer

if __name__ == "__main__":
    sys.modules["services.learner.megatron.trainer"] = trainer
    platform.prepare = lambda *_, **__: None  # it adapts Megatron, which is not there
    tamper("rank")
    rank.main()
