"""Deadline of a request's headers: a connection that does not finish them in time is closed; else who sends nothing could hold them all."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 20.0
"""From the connection, or the first byte of a later request, to the end of the headers. Bodies have their own (`middleware.limits`)."""

_Installed: Any = AutoHTTPProtocol


class Punctual:
    """The deadline, for any of uvicorn's HTTP protocols: name it before them."""

    transport: asyncio.Transport
    cycle: Any
    """The newest request whose headers are whole; None before the first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  uvicorn's own
        """As uvicorn makes it."""
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The first request is awaited."""
        super().connection_made(transport)  # type: ignore[misc]
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Something came: of headers, or of a body."""
        if self._deadline is None and self._between_requests():
            self._await_headers()
        super().data_received(data)  # type: ignore[misc]
        if not self._between_requests():
            self._await_nothing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._await_nothing()
        super().connection_lost(exc)  # type: ignore[misc]

    def _between_requests(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _await_headers(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEADERS_S, self.transport.close)

    def _await_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class PunctualProtocol(Punctual, _Installed):  # type: ignore[misc]
    """The HTTP protocol of uvicorn's that is installed, with the deadline."""
