"""Starts a job's ranks with torchelastic: `python -m services.learner.launch <torchrun arguments>`.

A process of its own between agent and ranks: the agent stays light and answers its health checks, and the ranks die with it.
"""

from __future__ import annotations

import signal
import sys

from services.common.parent import die_with_parent
from services.learner.nodes import Nodes

RANK_MODULE = "services.learner.rank"


def rank_command(nodes: Nodes, job_id: str, world_size: int, restarts: int) -> list[str]:
    """The command that starts this machine's share of the job's ranks, and restarts all of them, on all machines, when one dies.

    Raises:
        ConfigError: the ranks cannot be spread evenly over the machines.
    """
    return [
        sys.executable, "-m", "services.learner.launch", *nodes.torchrun_arguments(job_id, world_size),
        f"--max-restarts={restarts}", "--monitor-interval=0.5", "-m", RANK_MODULE,
    ]  # fmt: skip


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    from torch.distributed.run import main

    main(sys.argv[1:])
