"""Redis clients with every timeout set on purpose.

redis-py 8 cuts a blocking read at its default socket timeout of 5 s and tries every command up to 11 times. Both are kept in hand here:
a blocking client's socket timeout is its block time plus a margin, and only what may be repeated is ever sent: reads, plain writes that a
repeat does not change, and scripts that know a repeat (`jobs/lua.py`, `streams/lua.py`).

An outage is borne for `OUTAGE_S`. A server that answers but refuses writes (its disk or its memory is full) is waited for much longer:
a person has to act, and nothing is lost meanwhile. The log names the cause.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import SecretStr
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.redis.pool import WaitingPool

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 10.0
BLOCK_S = 2.0
"""How long one blocking read waits. Short, so that a drain is noticed soon."""
OUTAGE_S = 300.0
"""How long a service bears a Redis that does not answer, before it ends and is started again."""
REFUSAL_S = 24 * 3600.0
"""How long a service bears a Redis that answers and refuses: for want of disk or memory, or while it loads."""
LONGEST_PAUSE_S = 2.0
SAY_AGAIN_S = 30.0

_REFUSALS = ("MISCONF", "OOM", "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS")
"""What a Redis answers that cannot do its work just now; nothing was changed."""


def refusal(error: Exception) -> str | None:
    """Why a Redis that answers cannot do its work for now, in its own words; None for any other error."""
    if not isinstance(error, RedisError):
        return None
    said = f"{getattr(error, 'status_code', None) or ''} {error}".strip()
    return said if said.startswith(_REFUSALS) else None


def is_outage(error: Exception) -> bool:
    """Whether no answer came, or may still come: the command may be repeated."""
    refused = isinstance(error, AuthenticationError | AuthorizationError)
    return isinstance(error, RedisConnectionError | RedisTimeoutError) and not refused


_WAITING: set[asyncio.Task[Any] | None] = set()


def redis_is_away() -> bool:
    """Whether a command of this process has failed and is repeated: what waits for it does not hang by a fault of its own."""
    return bool(_WAITING)


def _cancellations() -> int:
    """How often the running task has been cancelled and not yet heard of it."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


class Client(Redis):
    """redis-py's client, whose commands end when they are cancelled.

    While it connects, redis-py takes a cancellation for a broken connection, and connects again: whoever cancelled would wait for ever.
    """

    async def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as redis-py has it
        """Sends a command and waits for its reply."""
        before = _cancellations()
        try:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        finally:
            if _cancellations() > before:
                raise asyncio.CancelledError


class Patience(Retry):
    """Repeats a command until it was answered, or until the time for its kind of failure is over."""

    def __init__(self, outage_s: float = OUTAGE_S, refusal_s: float = REFUSAL_S) -> None:
        """Bears an outage for `outage_s` seconds and a refusal for `refusal_s`."""
        super().__init__(NoBackoff(), -1, (RedisConnectionError, RedisTimeoutError, ResponseError))
        self._outage_s = outage_s
        self._refusal_s = refusal_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,  # noqa: FBT001, FBT002, RUF100  redis-py's own signature
    ) -> T:
        """Runs `do`; after a failure that may pass, runs `fail`, pauses, and tries again."""
        try:
            return await self._until_answered(do, fail, is_retryable, with_failure_count=with_failure_count)
        finally:
            _WAITING.discard(asyncio.current_task())

    async def _until_answered(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        *,
        with_failure_count: bool,
    ) -> T:
        began, said, failures, cancelled = time.monotonic(), 0.0, 0, _cancellations()
        while True:
            try:
                return await do()
            except RedisError as error:
                refused = refusal(error)
                if (
                    _cancellations() > cancelled
                    or not (refused or is_outage(error))
                    or (is_retryable and not is_retryable(error))
                ):
                    raise
                failures += 1
                _WAITING.add(asyncio.current_task())
                if not isinstance(error, ResponseError):  # the connection is of no more use
                    await (fail(error, failures) if with_failure_count else fail(error))
                if time.monotonic() - began >= (self._refusal_s if refused else self._outage_s):
                    raise
                if refused and time.monotonic() - said > SAY_AGAIN_S:
                    log.warning("Redis refuses for now, and is waited for: %s", refused)
                    said = time.monotonic()
            await asyncio.sleep(pause_s(failures))


def pause_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling, at most LONGEST_PAUSE_S, drawn at random so that clients spread."""
    longest: float = min(LONGEST_PAUSE_S, 0.025 * 2 ** min(failures, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def connect(
    url: str,
    *,
    block_s: float = 0.0,
    password: SecretStr | None = None,
    outage_s: float = OUTAGE_S,
    pool_wait_s: float = OUTAGE_S,
) -> Redis:
    """A client whose replies are bytes.

    A client that blocks gives a failure back at once: only its owner knows what a lost reply held (`Consumer` reads it again).

    Args:
        url: `redis://…`, `rediss://…` or `unix://…`.
        block_s: longest block of the commands sent through this client, seconds.
        password: of the URL's user, where the URL itself has none.
        outage_s: how long a command is repeated while Redis does not answer (never by a client that blocks).
        pool_wait_s: how long a command waits for a free connection while all are in use.
    """
    pool = WaitingPool.from_url(
        url,
        wait_s=pool_wait_s,
        password=password.get_secret_value() if password is not None else None,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=COMMAND_TIMEOUT_S + block_s,
        health_check_interval=15,
        retry=Patience(0.0, 0.0) if block_s else Patience(outage_s),
    )
    return Client.from_pool(pool)


def text(value: object) -> str:
    """A reply that is text, decoded; redis-py types every reply as a union of what the server could send."""
    return value.decode() if isinstance(value, bytes) else str(value)
