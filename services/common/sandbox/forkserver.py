"""Forkserver: a single-threaded process that has imported what its children need once, and forks children that are warm at birth.

    parent ── FORK + a socket ──►  forkserver  ── fork ──►  child (serves the socket)
           ── KILL pid ─────────►              ── SIGKILL its process group ──►  its wait status
                                               ── SIGKILL what it has left, wherever that hides

Forking from a process without threads is safe, and takes milliseconds where a start with its imports takes seconds. It reaps a
child only after it was told to kill it, so a pid is never reused while the parent still knows it; and later, since a large process takes
long to end, and others wait for their fork. When the parent goes away, all children are killed.

What a child has started and left behind, in a session of its own perhaps, becomes the forkserver's when its parent ends: it is killed, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from services.common.sandbox.output import mute
from services.common.service.logs import configure_logging
from services.common.service.process_tree import adopt_orphans, die_with_parent, kill_group, kill_orphans

REQUEST = struct.Struct("<ci")
REPLY = struct.Struct("<ii")
"""A child's pid, and how it had ended by itself before it was killed (as `os.waitpid` has it), else NOT_ENDED."""
FORK = b"F"
KILL = b"K"
READY = 0
NOT_ENDED = -1
LOOK_S, LOOK_AGAIN_S = 1.0, 0.05
"""How long after the last look for orphans the next one is; the second while killed processes are ending."""
LAST_LOOKS = 20
"""How often it looks again, LOOK_AGAIN_S apart, before it ends itself."""

Work = Callable[[socket.socket], object]
"""What a child does with its socket until that closes."""


def named(target: str) -> Any:  # noqa: ANN401  whatever the name stands for
    """What `package.module:name` stands for. The names are this code's own; none comes from a job."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def main(arguments: Sequence[str]) -> int:
    """Serves a control socket.

    Arguments: its file descriptor, the log level, the service's name, the work of the children, what to call before any is forked.
    """
    descriptor, log_level, service, work, *prepare = arguments
    control = socket.socket(fileno=int(descriptor))
    configure_logging(service, log_level)
    for target in prepare:
        named(target)()
    children = named(work)
    adopt_orphans()
    gc.collect()
    gc.freeze()  # children share these pages until they write to them
    control.sendall(REPLY.pack(READY, NOT_ENDED))
    serve(control, children)
    return 0


def serve(control: socket.socket, work: Work) -> None:
    """Forks and kills as asked until the parent goes away, then kills all that is left."""
    family = _Family()
    try:
        while True:
            pause_s = LOOK_AGAIN_S if family.look() else LOOK_S
            if not select.select([control], [], [], pause_s)[0]:
                continue
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            if not data:
                return
            command, pid = REQUEST.unpack(data)
            status = NOT_ENDED
            if command == FORK:
                pid = _fork(control, socket.socket(fileno=descriptors[0]), work)
                family.children.add(pid)
            elif pid in family.children:
                status = family.kill(pid)
            control.sendall(REPLY.pack(pid, status))
    except BrokenPipeError:
        return  # the parent went away before it had its answer
    finally:
        family.end()


class _Family:
    """The children, those that are ending, and what the dead have left behind."""

    def __init__(self) -> None:
        self.children: set[int] = set()
        self._dying: set[int] = set()

    def kill(self, pid: int) -> int:
        """Kills a child, unless it has ended by itself: then its wait status."""
        status = _ended(pid)
        self.children.discard(pid)
        if status == NOT_ENDED:
            kill_group(pid)
            self._dying.add(pid)
        return status

    def look(self) -> bool:
        """Reaps the dying that have ended, and kills what they have left; whether some are still ending."""
        self._dying = {pid for pid in self._dying if _ended(pid) == NOT_ENDED}
        self._dying |= kill_orphans(self.children | self._dying)
        return bool(self._dying)

    def end(self) -> None:
        """Kills all; waits for a second at most until there are no orphans any more."""
        for pid in self.children:
            kill_group(pid)
        self._dying |= self.children
        self.children = set()
        for _ in range(LAST_LOOKS):
            if not self.look():
                break
            time.sleep(LOOK_AGAIN_S)


def _fork(control: socket.socket, connection: socket.socket, work: Work) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL, parent)
            control.close()
            os.setsid()  # so that a kill takes along whatever it has started
            mute()
            work(connection)
        finally:
            os._exit(0)
    connection.close()
    return pid


def _ended(pid: int) -> int:
    """A child's wait status once it has ended, which reaps it; what it had started ends with it. NOT_ENDED before."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if found == 0:
        return NOT_ENDED
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
