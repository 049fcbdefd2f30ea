"""The learner agent, whose ranks are the scripted ones."""

from __future__ import annotations

from services.learner.__main__ import main
from services.learner.ranks import launch
from tests.chaos.entry import tamper

if __name__ == "__main__":
    launch.RANK_MODULE = "tests.chaos.entry.rank"
    tamper("learner")
    main()
