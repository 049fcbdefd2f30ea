"""A number is guessed in a few turns, after each of which "higher" or "lower" is said.

A policy that ignores what it is told wins `guesses / width` of the games at most, one that uses it all of them, with guesses enough.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.environment.base import Message, Observation

_NUMBER = re.compile(r"\s*(\d{1,6})\s*")


@dataclass
class GuessNumber:
    """The number is one of `width` from `low` on, and `low` one of `lows`."""

    width: int = 7
    guesses: int = 3
    lows: tuple[int, int] = (0, 93)
    """The first and the last; held-out tasks take others than training."""
    _number: int = field(default=0, init=False)
    _left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that makes no game."""
        self.lows = (int(self.lows[0]), int(self.lows[1]))
        if not 2 <= self.width <= 1000:
            raise ValueError(f"width must be 2 to 1000, not {self.width}")
        if not 1 <= self.guesses <= self.width:
            raise ValueError(f"guesses must be 1 to width, {self.width}, not {self.guesses}")
        if not 0 <= self.lows[0] <= self.lows[1]:
            raise ValueError(f"lows must be two numbers from 0 on, the smaller one first, not {self.lows}")

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:  # noqa: ARG002  an `Environment`
        """Draws range and number."""
        draw = random.Random(seed)  # noqa: S311  no secret
        low = draw.randint(*self.lows)
        self._number, self._left = low + draw.randrange(self.width), self.guesses
        return Observation((Message("user", f"{low}-{low + self.width - 1}?"),))

    def step(self, reply: str) -> Observation:
        """Compares a guess: an integer alone counts as one."""
        self._left -= 1
        guess = int(found[1]) if (found := _NUMBER.fullmatch(reply)) else None
        if guess == self._number:
            return Observation(done=True, reward=1.0, accuracy=1.0, detail=f"{self._number} was guessed")
        if not self._left:
            return Observation(done=True, reward=0.0, accuracy=0.0, detail=f"{self._number} was not guessed")
        if guess is None:
            return Observation((Message("user", "a number?"),))
        return Observation((Message("user", "higher" if self._number > guess else "lower"),))

    def close(self) -> None:
        """Has nothing to close."""


ENVIRONMENT = GuessNumber
