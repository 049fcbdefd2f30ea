"""Deadline of a request's headers: a connection that is too slow is closed, so that silent clients cannot occupy all of them."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS_S = 20.0
"""From the connection, or the first byte of a later request, to the end of the headers. Bodies: `middleware.limits`."""

_Installed: Any = AutoHTTPProtocol


class HeaderDeadline:
    """Mixin with the deadline for any HTTP protocol of uvicorn; stands before it in the list of bases."""

    transport: asyncio.Transport
    cycle: Any
    """The newest request whose headers are complete; None before the first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  uvicorn's own
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the deadline of the first request."""
        super().connection_made(transport)  # type: ignore[misc]
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Starts the deadline with the first byte of a request, and ends it with the last of the headers."""
        if self._deadline is None and self._between_requests():
            self._start_deadline()
        super().data_received(data)  # type: ignore[misc]
        if not self._between_requests():
            self._cancel_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the deadline."""
        self._cancel_deadline()
        super().connection_lost(exc)  # type: ignore[misc]

    def _between_requests(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEADERS_S, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HeaderDeadlineProtocol(HeaderDeadline, _Installed):  # type: ignore[misc]
    """The HTTP protocol that uvicorn uses here (httptools or h11), with the deadline."""
