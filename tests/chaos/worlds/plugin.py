"""Plug-in: the world as children of the environment service load it, with fail points of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import failpoints
from tests.chaos.worlds import world
from tests.chaos.worlds.deeds import DEEDS, wait_for_later
from tests.chaos.worlds.package import FOLDER, note_deed

_FOLDER = Path(os.environ[FOLDER])
failpoints.install("world", _FOLDER)


@dataclass
class World:
    """One episode."""

    step_s: float = 0.0
    """Time that an answer takes."""
    hostile: bool = False
    limit_s: float = 0.0
    """What an answer may take, for deeds that come just before it."""
    _seed: int = 0
    _turn: int = 0

    def reset(self, seed: int, task: Mapping[str, Any]) -> Any:
        """Begins it."""
        del task
        self._seed, self._turn = seed, 0
        return self._wrong("") or world.first(seed)

    def step(self, reply: str) -> Any:
        """Answers a reply."""
        wait_for_later()
        self._turn += 1
        time.sleep(self.step_s)
        return self._wrong(reply) or world.answer(self._seed, self._turn, reply)

    def close(self) -> None:
        """Has nothing to close."""

    def _wrong(self, reply: str) -> Any:
        """Does what the plan says; it may return what is no observation, or never."""
        plan = world.plan_of(self._seed) if self.hostile else None
        if plan is None or not plan.strikes(self._turn, reply):
            return None
        note_deed(_FOLDER, plan.deed, self._seed)
        return DEEDS[plan.deed](self.limit_s)
