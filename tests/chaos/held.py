"""How long places are held: each place at the environment service, and each wait of a rollout server for an environment.

Both note every place that an episode left before its end, or beyond its limit, as a line of `<folder>/held/<service>-<process id>`.
Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.environments import client
from services.environment import players
from services.environment.players import Call, Episode, EpisodeFailed, Players
from services.rollout.sampling import sampler

PLACE, WAIT, ENGINE = "place", "wait", "engine"


@dataclass(frozen=True, slots=True)
class Held:
    """One place, from its holder's last request to its being free."""

    slot: str
    """PLACE: at the environment service; WAIT: of an episode at a rollout server; ENGINE: of a group in the engine."""
    doing: str
    """What went on last: making, reset, step, reply or close."""
    pid: int
    """Of the service."""
    began: float
    ended: float
    limit_s: float
    taken: float
    """When the episode got its place; of others as `began`."""
    failed: str = ""
    """The reason, or `left` when the other side was gone."""
    why: str = ""
    """In words."""
    seed: int = -1

    @property
    def beyond_s(self) -> float:
        """Seconds beyond the limit; below 0 within it."""
        return self.ended - self.began - self.limit_s


class Notes:
    """What one process notes."""

    def __init__(self, service: str, folder: Path) -> None:
        """Nothing yet."""
        self._path = folder / "held" / f"{service}-{os.getpid()}"

    def add(self, held: Held) -> None:
        """One line."""
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(held)) + "\n")


def read(folder: Path) -> list[Held]:
    """All notes; the last line of a killed process may be cut."""
    found = []
    for path in (folder / "held").glob("*"):
        for line in path.read_text().splitlines():
            try:
                found.append(Held(**json.loads(line)))
            except ValueError:
                continue
    return found


@dataclass(slots=True)
class _Span:
    doing: str
    limit_s: float
    began: float
    taken: float

    def begin(self, doing: str, limit_s: float) -> None:
        self.doing, self.limit_s, self.began = doing, limit_s, time.monotonic()


class TimedEpisode(Episode):
    """Notes what it does."""

    def __init__(self, call: Call, child: Any, span: _Span) -> None:
        """As the episode; `span`: of its place."""
        super().__init__(call, child)
        self._span = span

    async def _request(self, method: str, *arguments: object) -> Any:
        self._span.begin(method, self._call.step_timeout_s)
        observation = await super()._request(method, *arguments)
        self._span.begin("reply", math.inf)  # the policy's turn; when it is over the rollout server knows
        return observation


class TimedPlayers(Players):
    """Notes how long places are held."""

    notes: Notes

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As the players."""
        super().__init__(*arguments, **options)
        self._spans: dict[int, _Span] = {}

    @asynccontextmanager
    async def episode(self, call: Call) -> AsyncIterator[Episode]:
        """An episode whose place is timed."""
        failed, why = "left", ""
        try:
            async with super().episode(call) as episode:
                span = self._spans[id(call)]
                span.begin("reset", math.inf)
                yield TimedEpisode(call, episode._child, span)
                span.begin("close", players._CLOSE_TIMEOUT_S)
            failed = ""
        except EpisodeFailed as failure:
            failed, why = str(failure.reason), str(failure)
            raise
        except Exception as error:
            failed, why = type(error).__name__, str(error)
            raise
        finally:
            if (had := self._spans.pop(id(call), None)) is not None:  # else it never had a place
                self._note(call, had, failed, why)

    async def _take_place(self, call: Call) -> None:
        await super()._take_place(call)
        now = time.monotonic()
        self._spans[id(call)] = _Span("making", call.step_timeout_s, now, now)

    def _note(self, call: Call, span: _Span, failed: str, why: str) -> None:
        held = Held(
            PLACE, span.doing, os.getpid(), span.began, time.monotonic(), span.limit_s, span.taken, failed, why, call.seed
        )  # fmt: skip
        if failed or held.beyond_s > 0.0:
            self.notes.add(held)


def watch_places(folder: Path) -> type[Players]:
    """The players of an environment service that notes its places."""
    TimedPlayers.notes = Notes("environment", folder)
    return TimedPlayers


def watch_rollouts(folder: Path) -> None:
    """Notes the waits of this rollout server for environments, and the places in its engine."""
    notes = Notes("rollout", folder)

    def note(slot: str, doing: str, began: float, limit_s: float, failed: str, why: str) -> None:
        ended = time.monotonic()
        if failed or ended - began > limit_s:
            notes.add(Held(slot, doing, os.getpid(), began, ended, limit_s, began, failed, why))

    kind: Any = client._Episode
    ask, within = kind._ask, sampler._within_limit

    @functools.wraps(ask)
    async def timed_ask(episode: Any, message: Any, limit_s: float) -> Any:
        doing = "reset" if message.HasField("begin") else "step"
        return await _timed(ask(episode, message, limit_s), functools.partial(note, WAIT, doing), limit_s)

    @functools.wraps(within)
    async def timed_within(rollouts: Any, task: Any) -> Any:
        limit_s = task.timeout_s if task.rollout_timeout_s is None else min(task.timeout_s, task.rollout_timeout_s)
        sampling = within(rollouts, task)
        if task.environment is None:
            return await sampling
        return await _timed(sampling, functools.partial(note, ENGINE, "group"), limit_s)

    kind._ask = timed_ask
    vars(sampler)["_within_limit"] = timed_within


async def _timed(work: Awaitable[Any], note: Callable[[float, float, str, str], None], limit_s: float) -> Any:
    began, failed, why = time.monotonic(), "left", ""
    try:
        result = await work
        failed = ""
    except Exception as error:
        failed, why = str(getattr(error, "reason", type(error).__name__)), str(error)
        raise
    finally:
        note(began, limit_s, failed, why)
    return result


@dataclass(frozen=True, slots=True)
class Stopped:
    """A process that stood still by a signal of the harness: it can hold nothing to its limit meanwhile."""

    pid: int
    since: float
    until: float

    def covers(self, held: Held) -> bool:
        """Whether it stood still while it held this."""
        return held.pid == self.pid and self.since < held.ended and held.began < self.until


def beyond_limits(found: Iterable[Held], stopped: Iterable[Stopped]) -> Iterator[Held]:
    """Those that count."""
    stops = list(stopped)
    return (held for held in found if not any(stop.covers(held) for stop in stops))


def left_late(found: Iterable[Held], deaths: Iterable[float]) -> Iterator[float]:
    """Seconds from each death of the one rollout server until each of its episodes had left its place."""
    places = [held for held in found if held.slot == PLACE]
    for died in deaths:
        yield from (held.ended - died for held in places if held.taken < died < held.ended)
