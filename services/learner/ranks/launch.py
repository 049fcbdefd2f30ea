"""Launcher of a job's ranks with torchelastic: `python -m services.learner.ranks.launch <torchrun arguments>`.

It is a process between agent and ranks: the agent stays light and answers its health checks, and the ranks die with the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.config.settings import Platform, Settings, load_settings
from services.common.errors import ConfigError
from services.common.service.process_tree import die_with_parent
from services.common.spec.job import JobSpec
from services.learner.ranks.deaths import TORCH_LOG, DeathsHandler
from services.learner.ranks.heartbeat import HEARTBEAT_DIR_VARIABLE
from services.learner.storage.folder import ERROR_FILE

LOCAL_BACKEND = "millrace-local"
"""Rendezvous backend of one machine's ranks (`rendezvous.py`)."""
JOIN_TIMEOUT_S = 600
"""Longest wait of a machine for the others, at the start and after a rank or a machine has died."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of one learner. Node 0 takes the jobs; the others start their ranks of node 0's job.

    All share MILLRACE_HOME (a network file system), Redis and the name MILLRACE_WORKER.
    """

    count: int = 1
    index: int = 0
    rendezvous: str = ""
    """host:port, on node 0."""
    address: str | None = None
    """Address of this machine for the others; None: its host name."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The nodes that the settings name; ConfigError names the variable that is missing or wrong."""
        count, index = settings.learner_nodes, settings.learner_node
        if index >= count:
            limit = f"MILLRACE_LEARNER_NODES={count} (they count from 0)"
            raise ConfigError(f"MILLRACE_LEARNER_NODE={index} must be below {limit}")
        if count == 1:
            return cls()
        if settings.worker is None:
            raise ConfigError(f"MILLRACE_WORKER: name the learner, the same on all {count} nodes")
        rendezvous = settings.learner_rendezvous or ""
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            wanted = "host:port on node 0, the same on all nodes"
            raise ConfigError(f"MILLRACE_LEARNER_RENDEZVOUS must be {wanted}, not {rendezvous!r}")
        return cls(count, index, rendezvous, settings.advertise_host)

    @property
    def leads(self) -> bool:
        """Whether this machine takes the jobs."""
        return self.index == 0

    def own_name(self, learner: str) -> str:
        """This machine's name among the workers: the learner's on node 0, with the node's number elsewhere."""
        return learner if self.leads else f"{learner}-node{self.index}"

    def ranks_here(self, world_size: int) -> int:
        """Ranks that this machine runs of `world_size`; ConfigError if they cannot be spread evenly."""
        if world_size % self.count:
            raise ConfigError(
                f"{world_size} ranks cannot be spread evenly over the learner's {self.count} nodes: they are learner.tensor_parallel_size "
                "× pipeline_parallel_size × data_parallel_size × context_parallel_size, and as many again for each role of placement own"
            )
        return world_size // self.count

    def torchrun_arguments(self, job_id: str, world_size: int) -> list[str]:
        """Arguments of torchelastic for this machine and the others; ConfigError if the ranks cannot be spread evenly."""
        here = [f"--nproc-per-node={self.ranks_here(world_size)}"]
        if self.count == 1:
            return ["--nnodes=1", *here, f"--rdzv-backend={LOCAL_BACKEND}", f"--rdzv-id={job_id}"]
        address = [f"--local-addr={self.address}"] if self.address else []
        return [
            f"--nnodes={self.count}", *here, "--rdzv-backend=c10d", f"--rdzv-id={job_id}", *address,
            f"--rdzv-endpoint={self.rendezvous}",
            f"--rdzv-conf=is_host={int(self.leads)},join_timeout={JOIN_TIMEOUT_S}",
        ]  # fmt: skip


RANK_MODULE = "services.learner.rank"


def launch_command(torchrun_arguments: list[str], restarts: int, module: str, *arguments: str) -> list[str]:
    """The command that starts this machine's ranks (`python -m module arguments`); when one dies, all machines' restart."""
    return [
        sys.executable, "-m", "services.learner.ranks.launch", *torchrun_arguments,
        f"--max-restarts={restarts}", "--monitor-interval=0.5", "-m", module, *arguments,
    ]  # fmt: skip


def rank_environment(settings: Settings, job_id: str, spec: JobSpec, metrics_dir: Path) -> dict[str, str]:
    """The environment of a job's ranks. Its number of threads is fixed: it determines the rounding."""
    threads = str(spec.learner.threads_per_rank)
    variables = {
        "MILLRACE_JOB": job_id, "MILLRACE_HOME": str(settings.home.resolve()), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GOMP_SPINCOUNT": "0",
        "PROMETHEUS_MULTIPROC_DIR": str(metrics_dir),
        # Ranks that are restarted get a store of their own: in a shared one they would find the dead ranks' addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Megatron warns at every start that Apex and Transformer Engine are not installed.
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
    }  # fmt: skip
    if settings.platform is not Platform.NPU:
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return {**os.environ, **variables}


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    os.environ.setdefault("LOGLEVEL", "ERROR")  # of torchelastic, which warns at every start and end
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main

    from services.learner.training.rendezvous import register_backend

    if HEARTBEAT_DIR_VARIABLE in os.environ:
        error_file = load_settings().job_dir(os.environ["MILLRACE_JOB"]) / ERROR_FILE
        logging.getLogger(TORCH_LOG).addHandler(DeathsHandler(Path(os.environ[HEARTBEAT_DIR_VARIABLE]), error_file))
    with tempfile.TemporaryDirectory(prefix="millrace-meet-", ignore_cleanup_errors=True) as folder:
        register_backend(LOCAL_BACKEND, Path(folder))
        try:
            main(sys.argv[1:])
        except SignalException as error:  # the agent ends its ranks
            sys.exit(128 + error.sigval)
