"""A worker: judges one check after the other, in a process that may be killed at any moment."""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import time
from typing import Any

import msgpack

from services.reward.check import ERROR, LIMIT, LOADED, MEMORY_MIB, SCORED, clean, unpacker
from services.reward.verifiers.base import Score, Verifier, lowest_reward
from services.reward.verifiers.registry import load

CPU_MARGIN_S = 2.0
"""CPU seconds beyond a check's wall-clock limit after which the kernel ends the worker, should nobody be left to kill it."""

MAX_BATCH_BYTES = 256 * 1024**2
"""Of checks received and not yet begun."""


def limit_resources() -> None:
    """Caps the memory of this process; no core dumps."""
    _limit_memory(MEMORY_MIB)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def work(connection: socket.socket) -> None:
    """Judges what comes until the connection closes."""
    verifiers: dict[str, Verifier] = {}
    incoming = unpacker(MAX_BATCH_BYTES)
    while data := connection.recv(1 << 16):
        incoming.feed(data)
        for name, response, ground_truth, extra_info, limit_s, memory_mib in incoming:
            _limit_cpu(limit_s)
            _limit_memory(memory_mib)
            reply = None if name in verifiers else _load(connection, verifiers, name)
            _send(connection, reply or _judge(verifiers[name], response, ground_truth, extra_info))


def _load(connection: socket.socket, verifiers: dict[str, Verifier], name: str) -> list[Any] | None:
    """Loads the verifier and says so; when that fails, the reply to send instead of a verdict."""
    began = time.monotonic()
    try:
        verifier = load(name)
        lowest = lowest_reward(verifier)
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is a failure of the verifier
        return [ERROR, clean(f"{type(error).__name__}: {error}")]
    verifiers[name] = verifier
    _send(connection, [LOADED, time.monotonic() - began, lowest])
    return None


def _judge(verifier: Verifier, response: str, ground_truth: str, extra_info: dict[str, Any]) -> list[Any]:
    began = time.monotonic()
    try:
        score: object = verifier(response, ground_truth, extra_info)
        if not isinstance(score, Score):
            return [ERROR, f"answered {type(score).__name__}, not a Score"]
        return [SCORED, float(score.reward), float(score.accuracy), clean(score.detail), time.monotonic() - began]
    except (MemoryError, RecursionError) as error:  # what the response asks for, not what the verifier is
        return [LIMIT, clean(f"{type(error).__name__}: beyond the limit of this check")]
    except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is a failure of the verifier, never a wrong answer
        return [ERROR, clean(f"{type(error).__name__}: {error}")]


def _send(connection: socket.socket, reply: list[Any]) -> None:
    connection.sendall(msgpack.packb(reply))


def _limit_memory(mib: int) -> None:
    """The soft limit only, since each check may have another; a verifier is not trusted to leave it alone, but to be killed."""
    with contextlib.suppress(ValueError):  # more is in use already than this check may have: the next allocation fails
        resource.setrlimit(resource.RLIMIT_AS, (mib * 1024**2, resource.RLIM_INFINITY))


def _limit_cpu(limit_s: float) -> None:
    used = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used + limit_s + CPU_MARGIN_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
