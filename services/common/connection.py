"""Redis clients with every timeout set on purpose.

redis-py 8 cuts a blocking read at its default socket timeout of 5 s and tries every command up to 11 times. Both are kept in hand here:
a blocking client's socket timeout is its block time plus a margin, and only idempotent commands and scripts are ever sent.
"""

from __future__ import annotations

from pydantic import SecretStr
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 10.0
BLOCK_S = 2.0
"""How long one blocking read waits. Short, so that a drain is noticed soon."""


def connect(url: str, *, block_s: float = 0.0, password: SecretStr | None = None) -> Redis:
    """A client whose replies are bytes.

    Args:
        url: `redis://…`, `rediss://…` or `unix://…`.
        block_s: longest block of the commands sent through this client, seconds.
        password: of the URL's user, where the URL itself has none.
    """
    return Redis.from_url(
        url,
        password=password.get_secret_value() if password is not None else None,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=COMMAND_TIMEOUT_S + block_s,
        health_check_interval=15,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=2.0), 8),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )


def text(value: object) -> str:
    """A reply that is text, decoded; redis-py types every reply as a union of what the server could send."""
    return value.decode() if isinstance(value, bytes) else str(value)
