"""Messages between a sandbox and its children, as MessagePack over a socket.

parent → child   [target, arguments, memory_mib, makes_way, wall_s]   once: what is made, and within which limits
                 [method, arguments, wall_s]                          then: a request to what was made
child → parent   [VALUE, value]  [ERROR, type, message]  or  [LIMIT, message]: one for each message of the parent's
"""

from __future__ import annotations

from typing import Any

import msgpack

from services.common import errors
from services.common.errors import ChildDied, MillraceError, SandboxError

VALUE = "value"
ERROR = "error"
LIMIT = "limit"
MAX_REQUEST_BYTES = 256 * 1024 * 1024
MAX_MESSAGE_CHARS = 4000


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
        case ["error", str(kind), str(text)]:
            raise _error(kind, text)
        case ["limit", str(text)]:
            raise ChildDied(text)
    raise ChildDied("answered with something that is no reply")


def clip(text: object) -> str:
    """An error's text, bounded, and fit for any wire."""
    return str(text)[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def known(name: str) -> type[MillraceError] | None:
    """The error of services/common/errors.py that has this name; the root is none of them."""
    kind = getattr(errors, name, None)
    own = isinstance(kind, type) and issubclass(kind, MillraceError) and kind is not MillraceError
    return kind if own else None


def _error(name: str, text: str) -> MillraceError:
    kind = known(name)
    return SandboxError(f"{name}: {text}" if text else name) if kind is None else kind(text)
