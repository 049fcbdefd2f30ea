"""gRPC server parts: the token check and the port, for the threaded server (weights) and the asyncio server (chats)."""

from __future__ import annotations

import hmac
from typing import Any

import grpc

from services.common.config.settings import address
from services.common.errors import ConfigError
from services.common.weights.channel import TOKEN_HEADER, bearer

REFUSED = "the token is missing or wrong"


def carries_token(call: grpc.HandlerCallDetails, token: str) -> bool:
    """Whether the call carries the token; compared in constant time."""
    sent = next((value for key, value in call.invocation_metadata if key == TOKEN_HEADER), "")
    return hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, bearer(token).encode())


def bind(server: Any, host: str, port: int, purpose: str) -> int:  # noqa: ANN401  the two servers have no common type
    """The port on which the server will listen; port 0 takes a free one. Raises ConfigError, which names `purpose`, when it cannot bind."""
    where = address(host, port)
    try:
        return int(server.add_insecure_port(where))
    except RuntimeError as error:
        raise ConfigError(f"cannot serve {purpose} on {where}: the address is taken or not of this machine") from error
