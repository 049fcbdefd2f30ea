"""Worker process: runs one check after the other; it may be killed at any moment."""

from __future__ import annotations

import resource
import socket
import time
from typing import Any

import msgpack

from services.common.config.plugins import VERIFIERS, offered
from services.common.config.verifiers import BuiltIn
from services.common.sandbox.limits import limit_cpu, limit_memory
from services.common.sandbox.messages import unpacker
from services.reward.pool.messages import ERROR, LIMIT, LOADED, MEMORY_MIB, SCORED, clean
from services.reward.verifiers.base import Verifier, as_score, load, lowest_reward

MAX_BATCH_BYTES = 256 * 1024**2
"""Of checks received and not yet started."""


def prepare() -> None:
    """Loads every built-in verifier in the forkserver, so that workers start warm."""
    offered(VERIFIERS)  # workers inherit the list
    for name in BuiltIn:
        load(name)
    # Builds the parser's tables, which takes longer than most checks.
    load(BuiltIn.MATH)(r"\boxed{\frac{1}{2}}", "0.5", {})


def work(connection: socket.socket) -> None:
    """Runs the checks that arrive until the connection closes."""
    limit_memory(MEMORY_MIB)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verifiers: dict[str, Verifier] = {}
    incoming = unpacker(MAX_BATCH_BYTES)
    while data := connection.recv(1 << 16):
        incoming.feed(data)
        for name, response, ground_truth, extra_info, limit_s, memory_mib in incoming:
            limit_cpu(limit_s)
            limit_memory(memory_mib)
            error = None if name in verifiers else _load(connection, verifiers, name)
            _send(connection, error or _judge(verifiers[name], response, ground_truth, extra_info))


def _load(connection: socket.socket, verifiers: dict[str, Verifier], name: str) -> list[Any] | None:
    """Loads the verifier and reports it; when that fails, returns the reply to send instead of a score."""
    began = time.monotonic()
    try:
        verifier = load(name)
        lowest = lowest_reward(verifier)
    except Exception as error:  # noqa: BLE001  foreign code: any error is a failure of the verifier
        return [ERROR, clean(f"{type(error).__name__}: {error}")]
    verifiers[name] = verifier
    _send(connection, [LOADED, time.monotonic() - began, lowest])
    return None


def _judge(verifier: Verifier, response: str, ground_truth: str, extra_info: dict[str, Any]) -> list[Any]:
    began = time.monotonic()
    try:
        score = as_score(verifier(response, ground_truth, extra_info))
        return [SCORED, score.reward, score.accuracy, clean(score.detail), time.monotonic() - began]
    except (MemoryError, RecursionError) as error:  # caused by the response, not by the verifier
        return [LIMIT, clean(f"{type(error).__name__}: beyond the limit of this check")]
    except Exception as error:  # noqa: BLE001  foreign code: any error is a failure of the verifier, never a wrong answer
        return [ERROR, clean(f"{type(error).__name__}: {error}")]


def _send(connection: socket.socket, reply: list[Any]) -> None:
    connection.sendall(msgpack.packb(reply))
