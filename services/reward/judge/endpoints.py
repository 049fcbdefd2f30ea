"""Endpoints of one reward server, with their keys, places and the cache: shared by all jobs."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.config.judges import VARIABLE, JudgeEndpoint
from services.common.errors import ConfigError
from services.reward.judge.cache import AnswerCache
from services.reward.judge.endpoint import Endpoint


class Endpoints:
    """Clients of all endpoints."""

    def __init__(self, settings: Mapping[str, JudgeEndpoint]) -> None:
        """Reads the keys. Raises ConfigError, which names the endpoint, when one cannot be had."""
        self._endpoints = {name: Endpoint(name, each, each.read_key(name)) for name, each in settings.items()}
        self.cache = AnswerCache()

    async def close(self) -> None:
        """Closes all connections."""
        for endpoint in self._endpoints.values():
            await endpoint.close()

    def named(self, name: str) -> Endpoint:
        """The endpoint of this name. Raises ConfigError when this server has none."""
        if name not in self._endpoints:
            raise ConfigError(f"this reward server has no judge endpoint {name!r} ({VARIABLE})")
        return self._endpoints[name]
