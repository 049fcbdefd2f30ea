"""Server in a child process: makes one object and serves requests to it, one after the other, until the socket closes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any

from services.common.sandbox.limits import limit_child, limit_cpu
from services.common.sandbox.messages import LIMIT, MAX_REQUEST_BYTES, VALUE, error_message, pack, unpacker


def serve(connection: socket.socket) -> None:
    """Work of a `Sandbox`'s child."""
    messages = _messages(connection)
    target, arguments, memory_mib, low_priority, cpu_s = next(messages)
    limit_child(memory_mib, low_priority=low_priority)
    limit_cpu(cpu_s)
    made: list[object] = []

    def make() -> object:
        result = resolve_name(target)(*arguments)
        if result is None or isinstance(result, bool | int | float | str | bytes | list | tuple | dict):
            return result
        made.append(result)  # an object, for requests to its methods
        return None

    def call(method: str, values: list[Any]) -> object:
        return getattr(made[0], method)(*values)

    connection.sendall(_reply(memory_mib, make))
    for method, values, cpu_s in messages:
        limit_cpu(cpu_s)
        connection.sendall(_reply(memory_mib, call, method, values))


def _messages(connection: socket.socket) -> Iterator[Any]:
    incoming = unpacker(MAX_REQUEST_BYTES)
    while data := connection.recv(1 << 16):
        incoming.feed(data)
        yield from incoming


def _reply(memory_mib: int, action: Callable[..., object], *arguments: object) -> bytes:
    try:
        return pack([VALUE, action(*arguments)])
    except MemoryError:
        return pack([LIMIT, f"needed more than {memory_mib} MiB"])
    except RecursionError:
        return pack([LIMIT, "was nested too deeply"])
    except Exception as error:  # noqa: BLE001  any error of foreign code or of ours is the reply
        return pack(error_message(error))
