"""Endpoints of one reward server, with their keys, places and the cache: shared by all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

from services.common.config.judges import VARIABLE, JudgeEndpoint
from services.common.errors import ConfigError
from services.reward.judge.cache import AnswerCache
from services.reward.judge.endpoint import Endpoint


class Endpoints:
    """Clients of all endpoints. `async with Endpoints(settings.judge_endpoints) as endpoints`."""

    def __init__(self, settings: Mapping[str, JudgeEndpoint]) -> None:
        """Reads the keys. Raises ConfigError, which names the endpoint, when one cannot be had."""
        self._endpoints = {name: Endpoint(name, each, each.read_key(name)) for name, each in settings.items()}
        self._stack = AsyncExitStack()
        self.cache = AnswerCache()

    async def __aenter__(self) -> Self:
        for endpoint in self._endpoints.values():
            await self._stack.enter_async_context(endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def named(self, name: str) -> Endpoint:
        """The endpoint of this name. Raises ConfigError when this server has none."""
        if name not in self._endpoints:
            raise ConfigError(f"this reward server has no judge endpoint {name!r} ({VARIABLE})")
        return self._endpoints[name]
