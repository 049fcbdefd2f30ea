"""Players: episodes in children, so many at once. Whatever a child does, its place is free again within its limit and half a second.

episode ──► place, within `queue_s` ──► child ──► reset, step, step, …, each within `step_timeout_s` ──► the child is killed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.common.errors import ChildDied, ChildLost, ChildTimeout, ConfigError, MillraceError
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.environment import metrics
from services.environment.base import BadObservation, Observation, observation_of

_REPLY_BYTES_PER_CHAR = 4
_REPLY_BYTES = 1 << 16
"""Of a reply, besides the characters of its texts."""


class Reason(StrEnum):
    """Why an episode failed; the label of a metric."""

    CONFIG = "config"
    """There is no such environment, or it refuses its settings: it would fail again."""
    NO_PLACE = "no_place"
    TIMEOUT = "timeout"
    DIED = "died"
    """It ended its process, or needed more memory than it may have."""
    KILLED = "killed"
    """Its process was ended or stopped from outside."""
    BAD_OBSERVATION = "bad_observation"
    ERROR = "error"
    """It raised one."""


for _label in Reason:
    metrics.FAILURES.labels(reason=_label)  # a counter that begins at 1 has no increase


class EpisodeFailed(MillraceError):  # noqa: N818  named after what happened
    """An episode cannot go on; never a reward. The message names the environment."""

    def __init__(self, name: str, reason: Reason, detail: str) -> None:
        super().__init__(f"environment {name} {detail}")
        self.reason = reason

    @property
    def permanent(self) -> bool:
        """Whether it would fail again."""
        return self.reason is Reason.CONFIG


@dataclass(frozen=True, slots=True)
class Call:
    """One episode's environment and its limits."""

    name: str
    config: dict[str, Any]
    seed: int
    task: dict[str, Any]
    """The row's `extra_info`."""
    queue_s: float
    """Longest wait for a place."""
    step_timeout_s: float
    """Of each answer, and of the making of the environment."""
    memory_mib: int = 1024
    most_chars: int = 1 << 16
    """Of one observation."""


class Episode:
    """One episode; its calls raise EpisodeFailed, after which it is over."""

    def __init__(self, call: Call, child: Child) -> None:
        self._call, self._child = call, child
        self.turn = 0
        """Replies that were asked for."""

    async def reset(self) -> Observation:
        """Begins it."""
        return await self._request("reset", self._call.seed, self._call.task)

    async def step(self, reply: str) -> Observation:
        """The environment's answer."""
        return await self._request("step", reply)

    async def _request(self, method: str, *arguments: object) -> Observation:
        call, began = self._call, time.monotonic()
        with _as_failure(call.name):
            values = await self._child.request(method, *arguments, wall_s=call.step_timeout_s)
            observation = observation_of(values, most_chars=call.most_chars)
        metrics.STEP_SECONDS.observe(time.monotonic() - began)
        return observation


class Players:
    """Children that play episodes."""

    def __init__(self, sandbox: Sandbox, *, places: int) -> None:
        """`places`: episodes at once."""
        self._sandbox, self._places = sandbox, asyncio.Semaphore(places)

    @asynccontextmanager
    async def episode(self, call: Call) -> AsyncIterator[Episode]:
        """An episode, as long as the context. Raises EpisodeFailed when it has no place in time, or cannot be made."""
        await self._take_place(call)
        try:
            metrics.EPISODES_IN_FLIGHT.inc()
            child = await self._make(call)
            try:
                yield Episode(call, child)
            finally:
                await asyncio.shield(child.close())
        finally:
            metrics.EPISODES_IN_FLIGHT.dec()
            self._places.release()

    async def _take_place(self, call: Call) -> None:
        try:
            async with asyncio.timeout(call.queue_s):
                await self._places.acquire()
        except TimeoutError:
            metrics.FAILURES.labels(reason=Reason.NO_PLACE).inc()
            raise EpisodeFailed(call.name, Reason.NO_PLACE, f"had no place within {call.queue_s:g} s") from None

    async def _make(self, call: Call) -> Child:
        limits = Limits(
            wall_s=call.step_timeout_s,
            memory_mib=call.memory_mib,
            reply_bytes=_REPLY_BYTES + _REPLY_BYTES_PER_CHAR * call.most_chars,
            low_priority=True,
        )
        with _as_failure(call.name, making=True):
            return await self._sandbox.spawn(
                "services.environment.player:Player", call.name, call.config, limits=limits
            )


@contextmanager
def _as_failure(name: str, *, making: bool = False) -> Iterator[None]:
    """Raises what a child did wrong as EpisodeFailed, and counts it. `making`: before the episode, an error is of the settings."""
    try:
        yield
    except MillraceError as error:
        reason, detail = _reason(error, making=making)
        metrics.FAILURES.labels(reason=reason).inc()
        raise EpisodeFailed(name, reason, detail) from error


def _reason(error: MillraceError, *, making: bool) -> tuple[Reason, str]:
    match error:
        case ConfigError() if making:
            return Reason.CONFIG, f"cannot be played: {error}"
        case BadObservation():
            return Reason.BAD_OBSERVATION, f"said what is no observation: {error}"
        case ChildTimeout():
            return Reason.TIMEOUT, str(error)
        case ChildDied():
            return Reason.DIED, str(error)
        case ChildLost():
            return Reason.KILLED, str(error)
    return Reason.ERROR, f"failed: {error}"
