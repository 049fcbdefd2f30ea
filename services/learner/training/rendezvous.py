"""Rendezvous of one machine's ranks: without a port, and out of reach of the machine's other users.

torchelastic's own (`--standalone`) and `env://` listen on every network interface, need no secret, and unpickle what they receive. Here
the launcher keeps its state in its own memory, and the ranks meet through a file in a private directory. The only connections are
gloo's own, on loopback.

Ranks on several machines meet over TCP (`ranks/launch.py`): keep that network closed.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.rendezvous import rendezvous

from services.common.errors import ConfigError

STORE = "MILLRACE_RANKS_STORE"
"""Environment variable that names the ranks' file, a new one for each start of them."""


class LocalRendezvous(RendezvousHandler):
    """Rendezvous of one machine: always complete."""

    def __init__(self, backend: str, run_id: str, folder: Path) -> None:
        """`backend`: its name in torchelastic; `folder`: a private directory."""
        self._backend, self._run_id, self._folder = backend, run_id, folder
        self._store = HashStore()
        self._rounds = 0
        self._closed = False
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def get_backend(self) -> str:
        """Its name in torchelastic."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Begins a round: the ranks that start next see nothing of earlier ones."""
        self._rounds += 1
        os.environ[STORE] = str(self._folder / f"round-{self._rounds}")
        with socket.socket() as probe:  # for ranks that use `env://` nevertheless
            probe.bind(("127.0.0.1", 0))
            meeting = RendezvousStoreInfo("127.0.0.1", probe.getsockname()[1])
        return RendezvousInfo(PrefixStore(str(self._rounds), self._store), 0, 1, meeting)

    def is_closed(self) -> bool:
        """Whether there will be no further round."""
        return self._closed

    def set_closed(self) -> None:
        """Ends the rounds."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """No other nodes."""
        return 0

    def get_run_id(self) -> str:
        """The launcher's name of this run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Has nothing to close."""
        return True


def register_backend(backend: str, folder: Path) -> None:
    """Registers this rendezvous as `--rdzv-backend=<backend>`, with its files in this private directory."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return LocalRendezvous(backend, parameters.run_id, folder)

    registry.register(backend, create)


class Work(Protocol):
    """A message under way."""

    def wait(self) -> bool:
        """Waits for its end."""
        ...


class HostGroup(Protocol):
    """Gloo's process group as it is used between pools, on tensors in host memory: torch comes without its types."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """From rank `root` to all, in place."""
        ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        """To a rank, which calls `recv`."""
        ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        """From a rank, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Joined:
    """What this rank has joined beside torch's own world, which is its pool."""

    pool: int = 0
    between: HostGroup | None = None
    """All ranks of all pools; None where there is one pool."""


_joined = [Joined()]
"""Of this process, as torch.distributed keeps its world: trainers that are built later, of a replay or a test, find it here."""


def join_process_group(backend: str, timeout: timedelta, pools: int = 1) -> Joined:
    """Joins this rank's pool, as the world of torch.distributed, and where there are several a group of all ranks; once in a process.

    The launcher's ranks meet through its file, or by `env://` on several machines; without a launcher there is one rank.

    Raises:
        ConfigError: the ranks cannot be divided into so many pools.
    """
    if dist.is_initialized():
        return _joined[0]
    store, rank, ranks = _meet()
    if ranks % pools:
        raise ConfigError(f"{ranks} ranks cannot be divided into {pools} pools")
    size = ranks // pools
    pool = rank // size
    own = PrefixStore(f"pool-{pool}", store)
    dist.init_process_group(backend, timeout=timeout, store=own, rank=rank % size, world_size=size)
    if pools > 1:
        group: Any = dist.ProcessGroupGloo(PrefixStore("between", store), rank, ranks, timeout)
        _joined[0] = Joined(pool, group)
    return _joined[0]


def _meet() -> tuple[Store, int, int]:
    """The store of all ranks, this one's number, and how many there are."""
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    if path := os.environ.get(STORE):
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return FileStore(path, ranks), rank, ranks
    met: tuple[Store, int, int] = next(rendezvous("env://"))
    return met


def leave_process_group() -> None:
    """Leaves the process group; one of gloo ends with the process, by `end_process`.

    Gloo's destructor waits, with Python's lock held, for a thread that may wait for that lock to release a tensor: ranks would never end.
    """
    if dist.get_backend() != "gloo":
        dist.destroy_process_group()
