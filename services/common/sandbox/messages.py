"""Messages between a sandbox and its children, as MessagePack over a socket.

parent → child   [target, arguments, memory_mib, low_priority, file_bytes, cpu_s]   first: the object to make, and the limits
                 [method, arguments, cpu_s]                                         then: a request to the object
child → parent   [number, VALUE, value]  [number, ERROR, type, [[field, message], …]]  or  [number, LIMIT, message]
                 one for each of the parent's messages, whose numbers count from 0: an answer that nobody asked for is known by its number
"""

from __future__ import annotations

from typing import Any

import msgpack

from services.common import errors
from services.common.errors import ChildDied, ConfigError, MillraceError, Problem, SandboxError

VALUE = "value"
ERROR = "error"
LIMIT = "limit"
MAX_REQUEST_BYTES = 256 * 1024 * 1024
MAX_MESSAGE_CHARS = 4000
"""Longest text of a problem."""
MAX_PROBLEMS = 1000
"""Most problems of one error."""


def pack(message: list[Any]) -> bytes:
    """The message's bytes. Raises ValueError, TypeError, OverflowError or RecursionError on a value that MessagePack cannot carry."""
    return bytes(msgpack.packb(message, unicode_errors="surrogatepass"))


def unpacker(max_bytes: int) -> msgpack.Unpacker:
    """A stream decoder without extension types; a message beyond `max_bytes` is an error."""
    return msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=max_bytes, unicode_errors="surrogatepass")


def answers(message: Any, number: int) -> bool:  # noqa: ANN401  any MessagePack value
    """Whether a child's message is the reply to the parent's message of this number."""
    return isinstance(message, list) and message[:1] == [number] and type(message[0]) is int


def read_reply(message: list[Any]) -> Any:  # noqa: ANN401  any MessagePack value
    """The value in a reply, validated: the child's code may be hostile.

    Raises:
        MillraceError: the child's error, as the same class where it is one of services/common/errors.py.
        ChildDied: the child passed a limit, or this is no reply.
    """
    match message[1:]:
        case ["value", value]:
            return value
        case ["error", str(kind), [*pairs]] if all(map(_is_problem, pairs)):
            raise _error(kind, [Problem(field, text) for field, text in pairs])
        case ["limit", str(text)]:
            raise ChildDied(text)
    raise ChildDied("answered with something that is no reply")


def error_message(error: Exception) -> list[Any]:
    """An error as a child's message, under the name that the parent knows: its own class's, or its nearest ancestor's."""
    kind = type(error)
    name = next((base.__name__ for base in kind.__mro__ if _known(base.__name__) is base), kind.__name__)
    problems = error.problems if isinstance(error, ConfigError) else [Problem("", str(error))]
    return [ERROR, name, [[clip(problem.field), clip(problem.message)] for problem in problems[:MAX_PROBLEMS]]]


def clip(text: object, most_chars: int = MAX_MESSAGE_CHARS) -> str:
    """The text, bounded, and valid UTF-8."""
    return str(text)[:most_chars].encode("utf-8", "replace").decode()


def _known(name: str) -> type[MillraceError] | None:
    """The error of services/common/errors.py with this name, unless it is the root."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, MillraceError) and kind is not MillraceError else None


def _is_problem(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _error(name: str, problems: list[Problem]) -> MillraceError:
    kind, text = _known(name), "\n".join(map(str, problems))
    if kind is None:
        return SandboxError(f"{name}: {text}" if text else name)
    return kind(*problems) if issubclass(kind, ConfigError) else kind(text)
