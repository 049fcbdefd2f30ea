"""The child's side: makes one object and answers requests to it, one after the other, until the socket closes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from services.common.sandbox.forkserver import named
from services.common.sandbox.limits import limit_child, limit_cpu
from services.common.sandbox.messages import LIMIT, MAX_REQUEST_BYTES, VALUE, error_message, pack, unpacker


def serve(connection: socket.socket) -> None:
    """What a child of a `Sandbox` does."""
    messages = _messages(connection)
    target, arguments, memory_mib, makes_way, wall_s = next(messages)
    limit_child(memory_mib, makes_way=makes_way)
    limit_cpu(wall_s)
    made: list[object] = []

    def make() -> object:
        result = named(target)(*arguments)
        if _is_value(result):
            return result
        made.append(result)  # an object whose methods are asked for
        return None

    def ask(method: str, values: list[Any]) -> object:
        return getattr(made[0], method)(*values)

    connection.sendall(_answer(make, memory_mib))
    for method, values, limit_s in messages:
        limit_cpu(limit_s)
        connection.sendall(_answer(partial(ask, method, values), memory_mib))


def _messages(connection: socket.socket) -> Iterator[Any]:
    incoming = unpacker(MAX_REQUEST_BYTES)
    while data := connection.recv(1 << 16):
        incoming.feed(data)
        yield from incoming


def _is_value(result: object) -> bool:
    return result is None or isinstance(result, bool | int | float | str | bytes | list | tuple | dict)


def _answer(action: Callable[[], object], memory_mib: int) -> bytes:
    try:
        return pack([VALUE, action()])
    except MemoryError:
        return pack([LIMIT, f"needed more than {memory_mib} MiB"])
    except RecursionError:
        return pack([LIMIT, "was nested too deeply"])
    except Exception as error:  # noqa: BLE001  foreign code, or an error of ours: whatever it raises is the answer
        return pack(error_message(error))
