"""gRPC server: what the one of threads (weights) and the one of an event loop (chats) have in common, the token and the port."""

from __future__ import annotations

import hmac
from typing import Any

import grpc

from services.common.config.settings import address
from services.common.errors import ConfigError
from services.common.weights.channel import TOKEN_HEADER, bearer

REFUSED = "the token is missing or wrong"


class TokenCheck:
    """Whether a call bears the token."""

    def __init__(self, token: str) -> None:
        """The one token that is good."""
        self._expected = bearer(token).encode()

    def passes(self, call: grpc.HandlerCallDetails) -> bool:
        """Compares in constant time."""
        given = [value for key, value in call.invocation_metadata if key == TOKEN_HEADER]
        sent = given[0] if given else ""
        return hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._expected)


def bind(server: Any, host: str, port: int, purpose: str) -> int:  # noqa: ANN401  the two kinds have no common type
    """The port on which the server will listen; 0 takes a free one. `purpose`: what it serves, for the error.

    Raises:
        ConfigError: the address is taken, or is not of this machine.
    """
    where = address(host, port)
    try:
        return int(server.add_insecure_port(where))
    except RuntimeError as error:
        raise ConfigError(f"cannot serve {purpose} on {where}: the address is taken or not of this machine") from error
