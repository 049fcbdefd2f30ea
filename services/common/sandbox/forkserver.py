"""Forkserver: a single-threaded process that has imported what its children need once, and forks children that are warm at birth.

    parent ── FORK + a socket ──►  forkserver  ── fork ──►  child (serves the socket)
           ── KILL pid ─────────►              ── SIGKILL its process group ──►  its wait status

Forking from a process without threads is safe, and takes milliseconds where a start with its imports takes seconds. It reaps a
child only after it was told to kill it, so a pid is never reused while the parent still knows it; and later, since a large process takes
long to end, and others wait for their fork. When the parent goes away, all children are killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from services.common.logs import configure_logging
from services.common.parent import die_with_parent
from services.common.sandbox.output import mute

REQUEST = struct.Struct("<ci")
REPLY = struct.Struct("<ii")
"""A child's pid, and how it had ended by itself before it was killed (as `os.waitpid` has it), else NOT_ENDED."""
FORK = b"F"
KILL = b"K"
READY = 0
NOT_ENDED = -1

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
    gc.collect()
    gc.freeze()  # children share these pages until they write to them
    control.sendall(REPLY.pack(READY, NOT_ENDED))
    serve(control, children)
    return 0


def serve(control: socket.socket, work: Work) -> None:
    """Forks and kills as asked until the parent goes away, then kills all that is left."""
    children: set[int] = set()
    dying: set[int] = set()
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            if not data:
                return
            command, pid = REQUEST.unpack(data)
            status = NOT_ENDED
            if command == FORK:
                pid = _fork(control, socket.socket(fileno=descriptors[0]), work)
                children.add(pid)
            elif pid in children:
                status = _ended(pid)
                children.discard(pid)
                if status == NOT_ENDED:
                    kill_group(pid)
                    dying.add(pid)
            control.sendall(REPLY.pack(pid, status))
            dying = {pid for pid in dying if _ended(pid) == NOT_ENDED}
    except BrokenPipeError:
        return  # the parent went away before it had its answer
    finally:
        for pid in children:
            kill_group(pid)


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


def kill_group(pid: int) -> None:
    """Ends a child and what it started."""
    for kill in (os.killpg, os.kill):  # the group; and the child itself, should it not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
