"""The nursery: a single-threaded process that has imported the verifiers once and forks workers that are warm at birth.

    pool ── FORK + a socket ──►  nursery  ── fork ──►  worker (serves the socket)
         ── KILL pid ─────────►           ── SIGKILL its process group ──►

Forking from a process without threads is safe, and takes milliseconds where a start with its imports takes seconds. It reaps a
worker only after it was told to kill it, so a pid is never reused under the pool's hand; and later, since a large process takes long to
end, and others wait for their fork. When the pool goes away, all workers are killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence

from services.common.logs import configure_logging
from services.common.parent import die_with_parent
from services.common.verifier_names import BuiltIn
from services.reward.verifiers.registry import load, offered
from services.reward.worker import limit_resources, work

REQUEST = struct.Struct("<ci")
REPLY = struct.Struct("<i")
FORK = b"F"
KILL = b"K"
READY = 0


def main(arguments: Sequence[str]) -> int:
    """Serves the control socket whose file descriptor is the first argument."""
    control = socket.socket(fileno=int(arguments[0]))
    configure_logging("reward-verifier", arguments[1])
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  lives as long as the process: verifiers may print
    offered()  # workers inherit the list
    for name in BuiltIn:
        load(name)
    load(BuiltIn.MATH)(
        r"\boxed{\frac{1}{2}}", "0.5", {}
    )  # builds the parser's tables, which takes longer than most checks
    gc.collect()
    gc.freeze()  # workers share these pages until they write to them
    control.sendall(REPLY.pack(READY))
    serve(control)
    return 0


def serve(control: socket.socket) -> None:
    """Forks and kills as asked until the pool goes away, then kills all that is left."""
    children: set[int] = set()
    dying: set[int] = set()
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            if not data:
                return
            command, pid = REQUEST.unpack(data)
            if command == FORK:
                pid = _fork(control, socket.socket(fileno=descriptors[0]))
                children.add(pid)
            elif pid in children:
                children.discard(pid)
                kill_group(pid)
                dying.add(pid)
            control.sendall(REPLY.pack(pid))
            dying = {pid for pid in dying if os.waitpid(pid, os.WNOHANG) == (0, 0)}
    except BrokenPipeError:
        return  # the pool went away before it had its answer
    finally:
        for pid in children:
            kill_group(pid)


def _fork(control: socket.socket, connection: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL, parent)
            control.close()
            os.setsid()  # so that a kill takes along whatever a verifier started
            limit_resources()
            work(connection)
        finally:
            os._exit(0)
    connection.close()
    return pid


def kill_group(pid: int) -> None:
    """Ends a worker and what it started."""
    for kill in (os.killpg, os.kill):  # the group; and the worker itself, should it not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
