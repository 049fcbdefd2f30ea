"""Player: one episode's environment, in a child process. Results are MessagePack values."""

from __future__ import annotations

from typing import Any

from services.environment.base import Values, values_of
from services.environment.registry import World, available, make


class Player:
    """The environment of one episode."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        """Makes it; raises as `registry.make`."""
        self._environment = make(name, config)

    def reset(self, seed: int, task: dict[str, Any]) -> Values:
        """Begins the episode."""
        return values_of(self._environment.reset(seed, task))

    def step(self, reply: str) -> Values:
        """Answers a reply."""
        return values_of(self._environment.step(reply))


def prepare() -> None:
    """Imports the environments that come along, in the forkserver."""
    available()  # children inherit the list
    for world in World:
        make(world, {})
