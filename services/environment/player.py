"""Player: plays one episode after the other, in a child process. Results are MessagePack values."""

from __future__ import annotations

import random
from typing import Any

from services.environment.base import Environment, Values, values_of
from services.environment.registry import World, available, load, make


class Player:
    """Environments of one name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._environment: Environment | None = None

    def make(self, config: dict[str, Any]) -> None:
        """The environment of the next episode; raises as `registry.make`."""
        self._environment = make(self._name, config)

    def reset(self, seed: int, task: dict[str, Any]) -> Values:
        """Begins the episode. Python's own generator begins alike, too: nothing is left of the episode before."""
        random.seed(seed)
        return values_of(self._made.reset(seed, task))

    def step(self, reply: str) -> Values:
        """Answers a reply."""
        return values_of(self._made.step(reply))

    def close(self) -> None:
        """Ends the episode."""
        environment, self._environment = self._made, None
        environment.close()

    @property
    def _made(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("no environment was made")
        return self._environment


def prepare() -> None:
    """Imports the environments that come along, in the forkserver."""
    available()  # children inherit the list
    for world in World:
        load(world)
