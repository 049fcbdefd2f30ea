"""Starts a job's ranks with torchelastic: `python -m services.learner.launch <torchrun arguments>`.

A process of its own between agent and ranks: the agent stays light and answers its health checks, and the ranks die with it.
"""

from __future__ import annotations

import signal
import sys

from services.common.parent import die_with_parent


def rank_command(world_size: int, restarts: int) -> list[str]:
    """The command that starts `world_size` ranks on this machine and restarts all of them when one dies."""
    return [
        sys.executable, "-m", "services.learner.launch", "--standalone", f"--nproc-per-node={world_size}",
        f"--max-restarts={restarts}", "--monitor-interval=0.5", "-m", "services.learner.rank",
    ]  # fmt: skip


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    from torch.distributed.run import main

    main(sys.argv[1:])
