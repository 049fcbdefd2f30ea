"""Messages between a sandbox and its children, as MessagePack over a socket.

parent → child   [target, arguments, memory_mib, makes_way, wall_s]   once: what is made, and within which limits
                 [method, arguments, wall_s]                          then: a request to what was made
child → parent   [VALUE, value]  [ERROR, type, [[field, message], …]]  or  [LIMIT, message]: one for each message of the parent's
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
MAX_PROBLEMS = 1000
"""Of one error, and the longest text of each."""


def pack(message: list[Any]) -> bytes:
    """The message's bytes.

    Raises:
        ValueError, TypeError, OverflowError, RecursionError: it holds something that MessagePack does not carry.
    """
    return bytes(msgpack.packb(message, unicode_errors="surrogatepass"))


def unpacker(max_bytes: int) -> msgpack.Unpacker:
    """A stream decoder without extension types; a message beyond `max_bytes` is an error."""
    return msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=max_bytes, unicode_errors="surrogatepass")


def read_reply(message: object) -> Any:  # noqa: ANN401  whatever was asked for
    """The value in a child's message; what it ran may have been hostile.

    Raises:
        MillraceError: what the child raised, as the same class where it is one of services/common/errors.py.
        ChildDied: it needed more than it may have, or this is no reply.
    """
    match message:
        case ["value", value]:
            return value
        case ["error", str(kind), [*pairs]] if (problems := _problems(pairs)) is not None:
            raise _error(kind, problems)
        case ["limit", str(text)]:
            raise ChildDied(text)
    raise ChildDied("answered with something that is no reply")


def clip(text: object) -> str:
    """An error's text, bounded, and fit for any wire."""
    return str(text)[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def _known(name: str) -> type[MillraceError] | None:
    """The error of services/common/errors.py that has this name; the root is none of them."""
    kind = getattr(errors, name, None)
    own = isinstance(kind, type) and issubclass(kind, MillraceError) and kind is not MillraceError
    return kind if own else None


def error_message(error: Exception) -> list[Any]:
    """An error as a child's message."""
    problems = error.problems if isinstance(error, ConfigError) else [Problem("", str(error))]
    pairs = [[clip(problem.field), clip(problem.message)] for problem in problems[:MAX_PROBLEMS]]
    return [ERROR, _nearest(type(error)), pairs]


def _nearest(kind: type[BaseException]) -> str:
    """The name under which the parent knows the error: its own, or its nearest ancestor's."""
    return next((base.__name__ for base in kind.__mro__ if _known(base.__name__) is base), kind.__name__)


def _problems(pairs: list[object]) -> list[Problem] | None:
    """The problems in an error's message, or None where it holds anything else."""
    problems = []
    for pair in pairs:
        match pair:
            case [str(field), str(text)]:
                problems.append(Problem(field, text))
            case _:
                return None
    return problems


def _error(name: str, problems: list[Problem]) -> MillraceError:
    kind, text = _known(name), "\n".join(map(str, problems))
    if kind is None:
        return SandboxError(f"{name}: {text}" if text else name)
    return kind(*problems) if issubclass(kind, ConfigError) else kind(text)
