"""Endpoint: the client of one OpenAI-compatible server, shared by all jobs that use it.

    complete ── turn (requests at once, requests a minute) ──► POST /chat/completions ──► text
                                     ▲                             │ 429, 5xx, no connection, too slow
                                     └── pause: Retry-After, or longer each time ◄──┘

Only the operator's address is called: redirects are not followed. The key is in no log and no error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import SecretStr

from services.common.config.judges import VARIABLE, JudgeEndpoint
from services.common.errors import ConfigError, VerifierError
from services.common.sandbox.messages import clip
from services.reward import metrics

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1024**2
"""Of a server's whole reply."""
MAX_REQUESTS = 6
"""Of one text: about eight seconds of an endpoint that is away."""
FIRST_PAUSE_S = 0.25
"""Before the second request; doubled before each further one."""
MAX_REASON_CHARS = 200
RESULTS = ("answered", "limited", "unavailable", "timeout", "refused")
"""Of one request, in metrics."""

_PASSING = frozenset({408, 425, 429})
"""Statuses below 500 that a later request may not meet."""


class JudgeError(VerifierError):
    """An endpoint gave no answer; the message has the reason."""


class _Passing(JudgeError):  # noqa: N818  an event
    """A failure that the next request may not meet."""

    def __init__(self, reason: str, result: str, pause_s: float | None = None) -> None:
        """`result`: for the metric; `pause_s`: as the server asks for."""
        super().__init__(reason)
        self.result, self.pause_s = result, pause_s


class Endpoint:
    """Client of one server. `async with endpoint.place(): text = await endpoint.complete(request, limit_s)`."""

    def __init__(self, name: str, settings: JudgeEndpoint, key: SecretStr | None) -> None:
        """Raises ConfigError when the address cannot be called."""
        self.name, self.settings, self._key = name, settings, key
        try:
            self._url = httpx.URL(f"{settings.url}/chat/completions")
        except httpx.InvalidURL as error:
            raise ConfigError(f"{VARIABLE}: {name}.url: {error}") from error
        headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.requests_at_once),
        )
        for result in RESULTS:
            metrics.JUDGE_REQUESTS.labels(name, result)  # a counter that begins at 1 has no increase
        self._places = asyncio.Semaphore(settings.requests_at_once)
        self._next_at = 0.0
        """`time.monotonic()` from which the next request may begin."""

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the endpoint's places: waits for it as long as others hold them all."""
        async with self._places:
            await self._pace()
            yield

    async def complete(self, request: Mapping[str, Any], limit_s: float) -> str:
        """The text of the model's answer, within `limit_s` seconds of which one request takes at most half. The caller holds a place.

        Raises:
            JudgeError: no answer: the server refused the request, or was away, busy or too slow until the end.
        """
        troubles: list[_Passing] = []
        try:
            async with asyncio.timeout(limit_s):
                return await self._tried(request, limit_s, troubles)
        except TimeoutError as error:
            seen = f"{troubles[-1]}, and then " if troubles else ""
            raise JudgeError(f"{seen}no answer within {limit_s:.3g} s") from error

    async def _tried(self, request: Mapping[str, Any], limit_s: float, troubles: list[_Passing]) -> str:
        """The answer of the first request that has one, of MAX_REQUESTS; adds what the others met. Raises JudgeError."""
        until = time.monotonic() + limit_s
        while True:
            try:
                return await self._once(request, limit_s / 2)
            except _Passing as trouble:
                troubles.append(trouble)
                tried = len(troubles)
                pause_s = trouble.pause_s if trouble.pause_s is not None else _backoff_s(tried)
                if tried >= MAX_REQUESTS or time.monotonic() + pause_s >= until:
                    raise JudgeError(f"{trouble} ({tried} requests, within {limit_s:.3g} s)") from trouble
                log.info("judge endpoint %s: %s; tried again in %.2f s", self.name, trouble, pause_s)
            metrics.JUDGE_RETRIES.labels(self.name).inc()
            await asyncio.sleep(pause_s)
            await self._pace()

    async def _pace(self) -> None:
        """Waits for this request's share of the requests a minute."""
        if self.settings.requests_per_minute is None:
            return
        begin_at = max(time.monotonic(), self._next_at)
        self._next_at = begin_at + 60.0 / self.settings.requests_per_minute
        await asyncio.sleep(begin_at - time.monotonic())

    async def _once(self, request: Mapping[str, Any], limit_s: float) -> str:
        """One request. Raises JudgeError, and _Passing where another may help."""
        began, result = time.monotonic(), "timeout"
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._post(request)
            result = "answered"
        except TimeoutError as error:
            raise _Passing(f"no answer within {limit_s:.3g} s", result) from error
        except httpx.TransportError as error:
            result = "unavailable"
            raise _Passing(
                f"cannot be reached: {type(error).__name__}: {self._redacted(str(error))}", result
            ) from error
        except _Passing as error:
            result = error.result
            raise
        except JudgeError:
            result = "refused"
            raise
        else:
            return answer
        finally:
            metrics.JUDGE_REQUESTS.labels(self.name, result).inc()
            metrics.JUDGE_REQUEST_SECONDS.labels(self.name).observe(time.monotonic() - began)

    async def _post(self, request: Mapping[str, Any]) -> str:
        try:
            async with self._client.stream("POST", self._url, json=dict(request)) as response:
                body = await _bounded(response)
        except httpx.DecodingError as error:
            raise JudgeError("the reply cannot be unpacked") from error
        status = response.status_code
        if status == httpx.codes.OK:
            return self._text(body)
        reason = f"status {status}: {self._redacted(body.decode(errors='replace'))}"
        if status in _PASSING or status >= 500:
            result = "limited" if status == httpx.codes.TOO_MANY_REQUESTS else "unavailable"
            raise _Passing(reason, result, _retry_after_s(response.headers))
        raise JudgeError(reason)

    def _text(self, body: bytes) -> str:
        """The answer's text in a reply of the server's, counted by its tokens."""
        try:
            reply = json.loads(body)
            text = reply["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise JudgeError("the reply is no chat completion") from error
        if not isinstance(text, str):
            raise JudgeError("the reply has no text")
        _count_tokens(self.name, reply.get("usage"))
        return text

    def _redacted(self, text: str) -> str:
        """The beginning of a text of the server's, without the key: a server may echo it."""
        if self._key is not None:
            text = text.replace(self._key.get_secret_value(), "***")
        return clip(" ".join(text.split()), MAX_REASON_CHARS)


async def _bounded(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise JudgeError(f"the reply has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _backoff_s(tried: int) -> float:
    """A pause that doubles each time, between half of it and all of it: servers that failed together are not asked together."""
    return FIRST_PAUSE_S * 2.0 ** (tried - 1) * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The header Retry-After as seconds, whether it is a number or a date; None where it is neither."""
    value = headers.get("retry-after", "").strip()
    if value.replace(".", "", 1).isdecimal() and len(value) < 16:
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _count_tokens(name: str, usage: object) -> None:
    if not isinstance(usage, dict):
        return
    for kind in ("prompt", "completion"):
        count = usage.get(f"{kind}_tokens")
        if type(count) is int and 0 <= count < 2**31:
            metrics.JUDGE_TOKENS.labels(name, kind).inc(count)
