"""Starts a job's ranks with torchelastic: `python -m services.learner.launch <torchrun arguments>`.

A process of its own between agent and ranks: the agent stays light and answers its health checks, and the ranks die with it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from services.common.parent import die_with_parent
from services.common.settings import Platform, Settings
from services.common.spec import JobSpec
from services.learner.nodes import Nodes
from services.learner.pulse import FOLDER
from services.learner.rank_deaths import TORCH_LOG, DeathsHandler

RANK_MODULE = "services.learner.rank"


def rank_command(nodes: Nodes, job_id: str, world_size: int, restarts: int) -> list[str]:
    """The command that starts this machine's share of the job's ranks, and restarts all of them, on all machines, when one dies.

    Raises:
        ConfigError: the ranks cannot be spread evenly over the machines.
    """
    return launch_command(nodes.torchrun_arguments(job_id, world_size), restarts, RANK_MODULE)


def launch_command(torchrun_arguments: list[str], restarts: int, module: str, *arguments: str) -> list[str]:
    """The command that starts ranks which run `python -m module arguments`."""
    return [
        sys.executable, "-m", "services.learner.launch", *torchrun_arguments,
        f"--max-restarts={restarts}", "--monitor-interval=0.5", "-m", module, *arguments,
    ]  # fmt: skip


def rank_environment(settings: Settings, job_id: str, spec: JobSpec, metrics_dir: Path) -> dict[str, str]:
    """The environment of a job's ranks; the same threads round the same way."""
    threads = str(spec.learner.threads_per_rank)
    variables = {
        "MILLRACE_JOB": job_id, "MILLRACE_HOME": str(settings.home.resolve()), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "0",
        "PROMETHEUS_MULTIPROC_DIR": str(metrics_dir),
        # A store of their own for ranks that were started again: in a shared one they would find the dead ones' addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    if settings.platform is not Platform.NPU:
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return {**os.environ, **variables}


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    from torch.distributed.run import main

    from services.learner.rendezvous import offer

    if FOLDER in os.environ:
        logging.getLogger(TORCH_LOG).addHandler(DeathsHandler(Path(os.environ[FOLDER])))
    with tempfile.TemporaryDirectory(prefix="millrace-meet-", ignore_cleanup_errors=True) as folder:
        offer(Path(folder))
        main(sys.argv[1:])
