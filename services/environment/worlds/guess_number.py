"""A number is guessed in a few turns, after each of which "higher" or "lower" is said, and what that leaves over.

A policy that ignores what it is told wins `guesses / width` of the games at most, one that uses it all of them, with guesses enough.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.environment.base import Message, Observation
from services.environment.worlds.settings import Part, is_in, require_part, require_whole

_NUMBER = re.compile(r"\s*(\d{1,6})\s*")
_MOST = 999_999


@dataclass
class GuessNumber:
    """The number is one of `width`, which are drawn from `numbers`."""

    width: int = 7
    guesses: int = 3
    numbers: tuple[int, int] = (10, 99)
    """The first and the last."""
    part: Part = "all"
    """Of the sums of what is drawn."""
    _number: int = field(default=0, init=False)
    _guesses_left: int = field(default=0, init=False)
    _left: list[int] = field(default_factory=list, init=False)
    """What may still be the number, in ascending order."""

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that makes no game."""
        first, last = self.numbers = (int(self.numbers[0]), int(self.numbers[1]))
        require_whole("width", self.width, 2, 100)
        if not 1 <= self.guesses <= self.width:
            raise ValueError(f"guesses must be 1 to width, {self.width}, not {self.guesses}")
        if not (0 <= first <= last - self.width + 1 and last <= _MOST):
            bounds = f"two of 0 to {_MOST}, with width, {self.width}, from one to the other"
            raise ValueError(f"numbers must be {bounds}, not {self.numbers}")
        require_part(self.part)
        least, most = (sum(range(end, end + self.width)) for end in (first, last - self.width + 1))
        if not any(is_in(total, self.part) for total in range(least, min(most, least + self.width) + 1)):
            raise ValueError(f"no {self.width} numbers of {self.numbers} are in part {self.part}")

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:  # noqa: ARG002  an `Environment`
        """Draws the numbers, and the one."""
        draw = random.Random(seed)  # noqa: S311  no secret
        first, last = self.numbers
        self._left = []
        while not (self._left and is_in(sum(self._left), self.part)):
            self._left = sorted(draw.sample(range(first, last + 1), self.width))
        self._number, self._guesses_left = draw.choice(self._left), self.guesses
        return self._ask("")

    def step(self, reply: str) -> Observation:
        """Compares a guess: an integer alone counts as one."""
        self._guesses_left -= 1
        guess = int(found[1]) if (found := _NUMBER.fullmatch(reply)) else None
        if guess == self._number:
            return Observation(done=True, reward=1.0, accuracy=1.0, detail=f"{self._number} was guessed")
        if not self._guesses_left:
            return Observation(done=True, reward=0.0, accuracy=0.0, detail=f"{self._number} was not guessed")
        if guess is None:
            return self._ask("a number: ")
        higher = self._number > guess
        self._left = [number for number in self._left if number != guess and (number > guess) is higher]
        return self._ask("higher: " if higher else "lower: ")

    def _ask(self, said: str) -> Observation:
        return Observation((Message("user", f"{said}{' '.join(map(str, self._left))}?"),))

    def close(self) -> None:
        """Has nothing to close."""


ENVIRONMENT = GuessNumber
