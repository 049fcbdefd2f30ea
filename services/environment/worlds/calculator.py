"""A product to work out, with a calculator at hand: a reply `calc: 12*34` is answered by the tool, any other is the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.environment.base import Message, Observation
from services.environment.worlds.settings import Part, is_in, require_part, require_whole

_CALL = re.compile(r"\s*calc:\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*")
_ANSWER = re.compile(r"\s*(\d{1,18})\s*")


@dataclass
class Calculator:
    """Both factors have `digits` digits; the tool may be used `calls` times."""

    digits: int = 2
    calls: int = 2
    part: Part = "all"
    """Of the pairs of factors, by their sum."""
    _product: int = field(default=0, init=False)
    _left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that makes no task."""
        require_whole("digits", self.digits, 1, 9)
        require_whole("calls", self.calls, 0, 100)
        require_part(self.part)

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:  # noqa: ARG002  an `Environment`
        """Draws the factors."""
        draw = random.Random(seed)  # noqa: S311  no secret
        first = second = 0
        while not (first and is_in(first + second, self.part)):
            first, second = (draw.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2))
        self._product, self._left = first * second, self.calls
        return Observation((Message("user", f"{first}*{second}?"),))

    def step(self, reply: str) -> Observation:
        """Calculates, or judges the answer."""
        if call := _CALL.fullmatch(reply):
            if not self._left:
                return self._end(0.0, "the calculator was used too often")
            self._left -= 1
            return Observation((Message("tool", str(int(call[1]) * int(call[2]))),))
        answer = _ANSWER.fullmatch(reply)
        if answer is None:
            return self._end(0.0, "neither a call nor a number")
        right = int(answer[1]) == self._product
        return self._end(float(right), f"{answer[1]} is {'right' if right else f'not {self._product}'}")

    def close(self) -> None:
        """Has nothing to close."""

    @staticmethod
    def _end(reward: float, detail: str) -> Observation:
        return Observation(done=True, reward=reward, accuracy=reward, detail=detail)


ENVIRONMENT = Calculator
