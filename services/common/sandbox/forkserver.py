"""Forkserver: a single-threaded process that imports what its children need once, and forks children that start warm.

    parent ── FORK + a socket ──►  forkserver  ── fork ──►  child (serves the socket)
           ── KILL pid ─────────►              ── SIGKILL its process group ──►  its wait status
                                               ── SIGKILL its orphans, in any session

Forking from a process without threads is safe, and takes milliseconds where a start with its imports takes seconds. The forkserver
reaps a child only after the parent's KILL, so no pid is reused while the parent still knows it. It replies before a killed child has
ended: a large process takes long to end, and others wait for their fork. When the parent goes away, all children are killed.

A process that a child left behind, even in a session of its own, becomes the forkserver's child (subreaper), and is killed too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

from services.common.sandbox.limits import limit_output
from services.common.service.logs import configure_logging
from services.common.service.process_tree import adopt_orphans, die_with_parent, kill_group, kill_orphans

REQUEST = struct.Struct("<ci")
REPLY = struct.Struct("<ii")
"""A child's pid, and its wait status (as of `os.waitpid`) if it had ended before the KILL, else NOT_ENDED."""
FORK = b"F"
KILL = b"K"
READY = 0
NOT_ENDED = -1
POLL_INTERVAL_S = 1.0
"""Between two searches for orphans."""
KILLED_POLL_INTERVAL_S = 0.05
"""Between two searches while killed processes are ending."""
MAX_EXIT_POLLS = 20
"""Searches, KILLED_POLL_INTERVAL_S apart, before the forkserver itself ends."""

Work = Callable[[socket.socket], object]
"""Work of a child with its socket, until that closes."""


def main(arguments: Sequence[str]) -> int:
    """Serves a control socket.

    Arguments: its file descriptor, the log level, the service's name, the children's work, functions to call before the first fork.
    Functions are `package.module:name`, names of this code, never of a job.
    """
    descriptor, log_level, service, work, *prepare = arguments
    control = socket.socket(fileno=int(descriptor))
    configure_logging(service, log_level)
    for target in prepare:
        resolve_name(target)()
    child_work = resolve_name(work)
    adopt_orphans()
    gc.collect()
    gc.freeze()  # children share these pages until they write to them
    control.sendall(REPLY.pack(READY, NOT_ENDED))
    serve(control, child_work)
    return 0


def serve(control: socket.socket, work: Work) -> None:
    """Forks and kills on request until the parent goes away, then kills all that is left."""
    children = _Children()
    try:
        while True:
            timeout_s = KILLED_POLL_INTERVAL_S if children.reap() else POLL_INTERVAL_S
            if not select.select([control], [], [], timeout_s)[0]:
                continue
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            if not data:
                return
            command, pid = REQUEST.unpack(data)
            status = NOT_ENDED
            if command == FORK:
                pid = _fork(control, socket.socket(fileno=descriptors[0]), work)
                children.alive.add(pid)
            elif pid in children.alive:
                status = children.kill(pid)
            control.sendall(REPLY.pack(pid, status))
    except BrokenPipeError:
        return  # the parent went away before its reply
    finally:
        children.kill_all()


class _Children:
    """The children, those that are ending, and the orphans of the dead."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self._ending: set[int] = set()

    def kill(self, pid: int) -> int:
        """Kills a child; returns its wait status if it had ended before."""
        status = _wait_status(pid)
        self.alive.discard(pid)
        if status == NOT_ENDED:
            kill_group(pid)
            self._ending.add(pid)
        return status

    def reap(self) -> bool:
        """Reaps killed processes that have ended, and kills their orphans; returns whether some are still ending."""
        self._ending = {pid for pid in self._ending if _wait_status(pid) == NOT_ENDED}
        self._ending |= kill_orphans(self.alive | self._ending)
        return bool(self._ending)

    def kill_all(self) -> None:
        """Kills all, and waits at most a second until there are no orphans any more."""
        for pid in self.alive:
            kill_group(pid)
        self._ending |= self.alive
        self.alive = set()
        for _ in range(MAX_EXIT_POLLS):
            if not self.reap():
                break
            time.sleep(KILLED_POLL_INTERVAL_S)


def _fork(control: socket.socket, connection: socket.socket, work: Work) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL, parent)
            control.close()
            os.setsid()  # a process group of its own: a kill reaches what it starts
            limit_output()
            work(connection)
        finally:
            os._exit(0)
    connection.close()
    return pid


def _wait_status(pid: int) -> int:
    """Reaps a child that has ended, kills its process group, and returns its wait status; NOT_ENDED while it runs."""
    reaped, status = os.waitpid(pid, os.WNOHANG)
    if reaped == 0:
        return NOT_ENDED
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
