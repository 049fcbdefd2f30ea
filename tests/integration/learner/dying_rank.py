"""A rank that dies as MILLRACE_TEST_DEATH says, before it has loaded anything."""

from __future__ import annotations

import os
import signal
import sys

from services.common.config.settings import Settings
from services.learner import rank

HOW = os.environ["MILLRACE_TEST_DEATH"]


def die(job_id: str, settings: Settings) -> None:  # noqa: ARG001  as `run_rank`
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "exit":
        sys.exit(3)
    raise ValueError(f"{job_id}: head size 16\nis not supported")


if __name__ == "__main__":
    vars(rank)["run_rank"] = die
    rank.main()
