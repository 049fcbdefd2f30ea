"""Redis clients with every timeout set on purpose.

redis-py 8 cuts a blocking read at its default socket timeout of 5 s and tries every command up to 11 times. This module controls both:
a blocking client's socket timeout is its block time plus a margin, and every command that is sent may be repeated: reads, plain writes
that a repeat does not change, and scripts that recognize a repeat (`jobs/lua.py`, `streams/lua.py`).

A command is repeated for `OUTAGE_S` during an outage, and much longer while a server answers but refuses writes (its disk or its memory
is full): a person has to act, and nothing is lost meanwhile. The log names the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic import SecretStr
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.batches import Batches
from services.common.redis.pool import MAX_CONNECTIONS, WaitingPool

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 10.0
BLOCK_S = 2.0
"""Longest wait of one blocking read. Short, so that a drain is noticed soon."""
OUTAGE_S = 300.0
"""Time for which a service waits for a Redis that does not answer; then it exits and is restarted."""
REFUSAL_S = 24 * 3600.0
"""Time for which a service waits for a Redis that answers and refuses: its disk or memory is full, or it loads."""
MAX_PAUSE_S = 2.0
LOG_INTERVAL_S = 30.0
BATCH_BYTES = 4 * 1024**2
"""Most bytes of the arguments of scripts that go together: their replies come when all of it has been sent."""

_REFUSALS = ("MISCONF", "OOM", "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS")
"""Error replies of a Redis that cannot execute commands for now; nothing was changed."""


def refusal(error: Exception) -> str | None:
    """Redis' own message why it cannot execute commands for now; None for any other error."""
    if not isinstance(error, RedisError):
        return None
    message = f"{getattr(error, 'status_code', None) or ''} {error}".strip()
    return message if message.startswith(_REFUSALS) else None


def is_outage(error: Exception) -> bool:
    """Whether there was no reply, or none yet: the command may be repeated."""
    refused = isinstance(error, AuthenticationError | AuthorizationError)
    return isinstance(error, RedisConnectionError | RedisTimeoutError) and not refused


_REPEATING: set[asyncio.Task[Any] | None] = set()
"""Tasks whose command has failed and is repeated."""


def redis_unavailable() -> bool:
    """Whether a command of this process has failed and is repeated: code that waits for it is then not hung by itself."""
    return bool(_REPEATING)


def _cancellations() -> int:
    """Number of cancellations of the running task that it has not received yet."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


class Client(Redis):
    """redis-py's client, with commands that end when they are cancelled, and scripts that go in batches.

    While it connects, redis-py treats a cancellation as a broken connection, and connects again: the canceller would wait for ever.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  as redis-py has it
        super().__init__(*args, **options)
        self._batches = Batches(self._send_batch, size_of=_bytes_of, most=BATCH_BYTES)
        self._scripts: dict[str, AsyncScript] = {}

    def register_script(self, script: Any) -> AsyncScript:  # type: ignore[override]  # noqa: ANN401  as redis-py has it
        """The script's caller, made once: redis-py hashes a script each time."""
        if script not in self._scripts:
            self._scripts[script] = super().register_script(script)
        return self._scripts[script]

    async def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as redis-py has it
        """Sends a command and waits for its reply."""
        if args[0] == "EVALSHA":
            reply = await self._batches.run(args)
            if not isinstance(reply, ResponseError):
                return reply
            if refusal(reply) is None:
                raise reply
            # Redis refuses for now: from here on the command is repeated by itself, and holds up no other.
        with _ending_when_cancelled():
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    async def _send_batch(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error for each command, which may be repeated as any other."""
        with _ending_when_cancelled():
            async with self.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies


def _bytes_of(command: tuple[Any, ...]) -> int:
    return sum(len(argument) for argument in command if isinstance(argument, bytes | str))


@contextlib.contextmanager
def _ending_when_cancelled() -> Iterator[None]:
    before = _cancellations()
    try:
        yield
    finally:
        if _cancellations() > before:
            raise asyncio.CancelledError


class RetryPolicy(Retry):
    """Retry policy: repeats a command until a reply comes, or until the time for its kind of failure is over."""

    def __init__(self, outage_s: float = OUTAGE_S, refusal_s: float = REFUSAL_S) -> None:
        super().__init__(NoBackoff(), -1, (RedisConnectionError, RedisTimeoutError, ResponseError))
        self._outage_s, self._refusal_s = outage_s, refusal_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Runs `do`; after a failure that may pass, runs `fail`, pauses, and tries again."""
        began, logged_at, failures, cancelled = time.monotonic(), 0.0, 0, _cancellations()
        try:
            while True:
                try:
                    return await do()
                except RedisError as error:
                    refused = refusal(error)
                    repeatable = (refused or is_outage(error)) and (is_retryable is None or is_retryable(error))
                    if _cancellations() > cancelled or not repeatable:
                        raise
                    failures += 1
                    _REPEATING.add(asyncio.current_task())
                    if not isinstance(error, ResponseError):  # the connection is unusable
                        await (fail(error, failures) if with_failure_count else fail(error))
                    if time.monotonic() - began >= (self._refusal_s if refused else self._outage_s):
                        raise
                    if refused and time.monotonic() - logged_at > LOG_INTERVAL_S:
                        log.warning("Redis refuses for now, and is waited for: %s", refused)
                        logged_at = time.monotonic()
                await asyncio.sleep(pause_s(failures))
        finally:
            _REPEATING.discard(asyncio.current_task())


def pause_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling, at most MAX_PAUSE_S, with random jitter so that clients spread."""
    longest: float = min(MAX_PAUSE_S, 0.025 * 2 ** min(failures, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def connect(
    url: str,
    *,
    block_s: float = 0.0,
    password: SecretStr | None = None,
    outage_s: float = OUTAGE_S,
    pool_wait_s: float = OUTAGE_S,
    max_connections: int = MAX_CONNECTIONS,
) -> Redis:
    """A client whose replies are bytes.

    A client that blocks raises a failure at once: only its user can recover the entries of a lost reply (`Consumer` reads them again).

    Args:
        url: `redis://…`, `rediss://…` or `unix://…`.
        block_s: longest block of the commands sent through this client, seconds.
        password: of the URL's user, where the URL itself has none.
        outage_s: how long a command is repeated while Redis does not answer (never by a client that blocks).
        pool_wait_s: how long a command waits for a free connection while all are in use.
        max_connections: most connections at once.
    """
    pool = WaitingPool.from_url(
        url,
        wait_s=pool_wait_s,
        max_connections=max_connections,
        password=password.get_secret_value() if password is not None else None,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=COMMAND_TIMEOUT_S + block_s,
        health_check_interval=15,
        retry=RetryPolicy(0.0, 0.0) if block_s else RetryPolicy(outage_s),
    )
    return Client.from_pool(pool)


def text(value: object) -> str:
    """A text reply, decoded; redis-py types every reply as a union of all that the server could send."""
    return value.decode() if isinstance(value, bytes) else str(value)
