"""Players: episodes in children, so many at once. Whatever a child does, its place is free again within its limit and half a second.

episode ──► place, within `queue_s` ──► child ──► make, reset, step, step, …, each within `step_timeout_s` ──► close
              an idle one of this environment, or a new one                          whatever fails: the child is killed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from services.common.environments.types import Reason
from services.common.errors import (
    ChildDied,
    ChildLost,
    ChildTimeout,
    ConfigError,
    EnvironmentUnavailable,
    MillraceError,
)
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.environment import metrics
from services.environment.base import BadObservation, Observation, observation_of

log = logging.getLogger(__name__)

_REPLY_BYTES_PER_CHAR = 4
_REPLY_BYTES = 1 << 16
"""Of a reply, besides the characters of its texts."""
RECYCLE_AFTER = 200
"""Episodes after which a child ends, and with it the memory that environments leak."""
_CLOSE_TIMEOUT_S = 0.25
_LONGEST_IDLE_S = 30.0

for _label in set(Reason) - {Reason.SILENT, Reason.LOST}:
    metrics.FAILURES.labels(reason=_label)  # a counter that begins at 1 has no increase


_ENDED: dict[type[MillraceError], Reason] = {
    ChildTimeout: Reason.TIMEOUT, ChildDied: Reason.DIED, ChildLost: Reason.KILLED
}  # fmt: skip


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


@dataclass(slots=True)
class _Player:
    """A child that plays episodes of one environment, one after the other."""

    name: str
    limits: Limits
    child: Child
    episodes: int = 0
    """That have ended."""
    idle_since: float = 0.0
    """`time.monotonic()`."""


class Players:
    """Children that play episodes."""

    def __init__(self, sandbox: Sandbox, *, places: int) -> None:
        """`places`: episodes at once."""
        self._sandbox, self._most, self._places = sandbox, places, asyncio.Semaphore(places)
        self._idle: list[_Player] = []
        """The longest idle one first."""
        self.playing = 0
        """Episodes that have a place."""

    @asynccontextmanager
    async def episode(self, call: Call) -> AsyncIterator[Episode]:
        """An episode, as long as the context. Raises EpisodeFailed when it has no place in time, or cannot be made."""
        await self._take_place(call)
        try:
            self.playing += 1
            metrics.EPISODES_IN_FLIGHT.inc()
            player = await self._player(call)
            try:
                yield Episode(call, player.child)
            except BaseException:
                await asyncio.shield(player.child.close())
                raise
            else:
                await asyncio.shield(self._end(player))
        finally:
            self.playing -= 1
            metrics.EPISODES_IN_FLIGHT.dec()
            self._places.release()

    async def end_idle(self, *, after_s: float = _LONGEST_IDLE_S) -> None:
        """Ends the children that have been idle for longer; call it from time to time."""
        while self._idle and self._idle[0].idle_since <= time.monotonic() - after_s:
            await self._idle.pop(0).child.close()

    async def _take_place(self, call: Call) -> None:
        try:
            async with asyncio.timeout(call.queue_s):
                await self._places.acquire()
        except TimeoutError:
            metrics.FAILURES.labels(reason=Reason.NO_PLACE).inc()
            raise EpisodeFailed(call.name, Reason.NO_PLACE, f"had no place within {call.queue_s:g} s") from None

    async def _player(self, call: Call) -> _Player:
        """A child in which the episode's environment is made; a new one or not, within the limit of an answer."""
        limits = Limits(
            wall_s=call.step_timeout_s,
            memory_mib=call.memory_mib,
            reply_bytes=_REPLY_BYTES + _REPLY_BYTES_PER_CHAR * call.most_chars,
            low_priority=True,
        )
        with _as_failure(call.name, making=True):
            try:
                async with asyncio.timeout(call.step_timeout_s):
                    return await self._made(call, limits)
            except TimeoutError:
                raise ChildTimeout(f"was not made within {call.step_timeout_s:g} s") from None

    async def _made(self, call: Call, limits: Limits) -> _Player:
        if idle := await self._take_idle(call.name, limits):
            with suppress(ChildDied, ChildLost):  # it has ended while nobody looked
                return await _make(idle, call.config)
        if self._idle and self.playing + len(self._idle) > self._most:
            await self._idle.pop(0).child.close()
        child = await self._sandbox.spawn("services.environment.player:Player", call.name, limits=limits)
        return await _make(_Player(call.name, limits, child), call.config)

    async def _take_idle(self, name: str, limits: Limits) -> _Player | None:
        """The newest idle one that fits. One that a signal has stopped would cost the episode its whole limit: it ends here."""
        while fitting := [player for player in self._idle if (player.name, player.limits) == (name, limits)]:
            player = fitting[-1]
            self._idle.remove(player)
            if not player.child.stopped:
                return player
            await player.child.close()
        return None

    async def _end(self, player: _Player) -> None:
        """Closes the environment, and keeps its child for another episode unless that fails."""
        player.episodes += 1
        try:
            await player.child.request("close", wall_s=_CLOSE_TIMEOUT_S)
        except MillraceError as error:
            log.warning("environment %s: close: %s", player.name, error)
        else:
            if player.episodes < RECYCLE_AFTER:
                player.idle_since = time.monotonic()
                self._idle.append(player)
                return
        await player.child.close()


async def _make(player: _Player, config: dict[str, Any]) -> _Player:
    """The player with its next environment; it ends when that cannot be made."""
    try:
        await player.child.request("make", config)
    except BaseException:
        await player.child.close()
        raise
    return player


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
        case EnvironmentUnavailable():
            return Reason.UNAVAILABLE, f"is unavailable: {error}"
        case BadObservation():
            return Reason.BAD_OBSERVATION, f"said what is no observation: {error}"
        case ChildTimeout() | ChildDied() | ChildLost():
            return _ENDED[type(error)], str(error)
    return Reason.ERROR, f"failed: {error}"
