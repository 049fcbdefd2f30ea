"""gRPC server parts: the token check and the port, for the threaded server (weights) and the asyncio servers (chats, episodes)."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from services.common.config.settings import address
from services.common.errors import ConfigError
from services.common.weights.channel import SERVER_OPTIONS, TOKEN_HEADER, bearer

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


@asynccontextmanager
async def serving(
    add: Callable[[grpc.aio.Server], None],
    host: str,
    port: int,
    token: str | None,
    *,
    purpose: str,
    request_bytes: int,
    grace_s: float,
) -> AsyncIterator[int]:
    """Serves on a port, which it yields; 0 takes a free one.

    `add`: gives the server its service. `token`: that every call must carry. `purpose`: names the port in an error. `request_bytes`:
    longest message that it accepts. `grace_s`: for the last replies at the end.

    Raises:
        ConfigError: it cannot listen there.
    """
    interceptors = [TokenInterceptor(token)] if token else []
    options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": request_bytes}
    server = grpc.aio.server(interceptors=interceptors, options=list(options.items()))
    add(server)
    bound = bind(server, host, port, purpose)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace_s)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the token, whatever its method."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Passes the call on, or refuses it; the refusal is a status only, so it fits a streaming call too."""
        if carries_token(handler_call_details, self._token):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)
