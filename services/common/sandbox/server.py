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
    target, arguments, memory_mib, low_priority, file_bytes, cpu_s = next(messages)
    limit_child(memory_mib, low_priority=low_priority, file_bytes=file_bytes)
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

    connection.sendall(_reply(0, memory_mib, make))
    for number, (method, values, cpu_s) in enumerate(messages, start=1):
        limit_cpu(cpu_s)
        connection.sendall(_reply(number, memory_mib, call, method, values))


def _messages(connection: socket.socket) -> Iterator[Any]:
    incoming = unpacker(MAX_REQUEST_BYTES)
    while data := connection.recv(1 << 16):
        incoming.feed(data)
        yield from incoming


def _reply(number: int, memory_mib: int, action: Callable[..., object], *arguments: object) -> bytes:
    try:
        return pack([number, VALUE, action(*arguments)])
    except MemoryError:
        return pack([number, LIMIT, f"needed more than {memory_mib} MiB"])
    except RecursionError:
        return pack([number, LIMIT, "was nested too deeply"])
    except Exception as error:  # noqa: BLE001  any error of foreign code or of ours is the reply
        return pack([number, *error_message(error)])
