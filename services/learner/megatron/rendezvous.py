"""Rendezvous of one machine's ranks: no port, nothing that another user of the machine could reach.

torchelastic's own (`--standalone`) and `env://` listen on every network interface, ask nobody for a secret, and read Python pickles out of
what they were sent. Here the launcher keeps its state to itself, and the ranks meet in a file of a private directory. What remains are
gloo's own connections, on loopback.

Ranks on several machines meet over TCP (`ranks/launch.py`): keep that network closed.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

STORE = "MILLRACE_RANKS_STORE"
"""Environment variable that names the ranks' file; another one for each start of them."""


class LocalRendezvous(RendezvousHandler):
    """One machine, which is always complete."""

    def __init__(self, backend: str, run_id: str, folder: Path) -> None:
        """`backend`: its name for torchelastic; `folder`: a private directory."""
        self._backend, self._run_id, self._folder = backend, run_id, folder
        self._store = HashStore()
        self._rounds = 0
        self._closed = False
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def get_backend(self) -> str:
        """What torchelastic calls it."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """A new round: the ranks that are started next find nothing of earlier ones."""
        self._rounds += 1
        os.environ[STORE] = str(self._folder / f"round-{self._rounds}")
        with socket.socket() as probe:  # for ranks that meet by `env://` all the same
            probe.bind(("127.0.0.1", 0))
            meeting = RendezvousStoreInfo("127.0.0.1", probe.getsockname()[1])
        return RendezvousInfo(PrefixStore(str(self._rounds), self._store), 0, 1, meeting)

    def is_closed(self) -> bool:
        """Whether no further round will come."""
        return self._closed

    def set_closed(self) -> None:
        """No further round comes."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """There are no others."""
        return 0

    def get_run_id(self) -> str:
        """What the launcher was told to call this run."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True


def offer(backend: str, folder: Path) -> None:
    """Makes `--rdzv-backend=<backend>` this rendezvous, with its files in this private directory."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LocalRendezvous(backend, parameters.run_id, folder)

    registry.register(backend, create)


def meet(backend: str, timeout: timedelta) -> None:
    """Joins the process group of the launcher's ranks: in the file that it named, or by `env://` where machines meet."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if path := os.environ.get(STORE):
        dist.init_process_group(
            backend, timeout=timeout, store=FileStore(path, world_size), rank=rank, world_size=world_size
        )
    else:
        dist.init_process_group(backend, timeout=timeout)
