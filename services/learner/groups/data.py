"""Data of a job, as its head has it: tasks by ordinal, made ahead in a child process that may be killed (`sources`).

ordinal ──► made ahead? ──► record
               │ no: the child makes as many as it can within a moment
               └──► not in time, or the child died: a new child, that task alone ──► still not: the job cannot go on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.config.settings import Settings
from services.common.data.record import TaskRecord
from services.common.errors import ChildDied, ChildLost, ChildTimeout, DataError, MillraceError, SandboxError
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.spec.job import JobSpec
from services.learner.groups.sources import Made, unpack

log = logging.getLogger(__name__)

SOURCES = "services.learner.groups.sources:Sources"

OPEN_S = 300.0
"""Longest opening of a source, and comparison of the two."""
TASK_S = 30.0
"""Longest making of one task."""
SOON_S = 0.25
"""For so long a child makes more tasks than the one that is waited for."""
AHEAD = 64
"""Most tasks that are made ahead."""
LOSSES = 3
"""Children that may be killed from outside over one request."""
_MIB = 1024 * 1024
_LEAST_MIB = 2048
_PER_BYTE = 4
"""Bytes of memory that a byte of the largest file that may be read takes, its lines and rows included."""
_ORDER_BYTES = 40
"""Of memory that one task takes in the orders of two epochs."""


class TaskNotMade(MillraceError):  # noqa: N818  what has happened
    """One task cannot be made: its group fails, and others may go on."""


def limits_of(spec: JobSpec, settings: Settings) -> Limits:
    """What a child that reads the job's data may use."""
    sources = [source for source in (spec.data.train, spec.data.eval) if source is not None]
    files = sum(source.procedural_task is None for source in sources) * _PER_BYTE * settings.max_data_bytes
    order = max(source.size or 0 for source in sources) * _ORDER_BYTES
    return Limits(wall_s=OPEN_S, memory_mib=_LEAST_MIB + (files + order) // _MIB)


@dataclass(slots=True)
class _Ahead:
    """Tasks of one source that are made before they are asked for."""

    where: str
    """Where the source stands in the spec."""
    method: str
    """What the child calls their making."""
    made: dict[int, Made] = field(default_factory=dict)
    reached: int = 0
    """Numbers below it were asked for before: what is asked for again is made alone. A new evaluation begins at 0."""
    at_once: int = 1


class JobData:
    """One job's tasks. Call `open` first, and `close` at the end."""

    def __init__(self, sandbox: Sandbox, spec: JobSpec, settings: Settings) -> None:
        """Starts nothing yet; whoever made the sandbox stops it."""
        self._sandbox, self._spec, self._settings = sandbox, spec, settings
        self._child: Child | None = None
        self._rows: list[int] = []
        self._train = _Ahead("data.train", "training")
        self._eval = _Ahead("data.eval", "evaluation")
        self._turn = asyncio.Lock()
        self.fingerprint = ""
        """Of the training source."""

    @property
    def held_out_tasks(self) -> int:
        """Tasks of one evaluation."""
        return len(self._rows)

    async def open(self) -> None:
        """Opens what the job needs.

        Raises:
            DataError: a source cannot be opened, or not in time; names the field.
        """
        self.fingerprint = (await self._open("data.train", "open_train"))["fingerprint"]
        if self._spec.data.eval is not None and self._spec.eval.enabled:
            self._rows = await self._open("data.eval", "held_out")

    async def check(self) -> None:
        """Finds a person's mistakes before any rank is started: reads the model's files and opens every source, as the ranks will.

        Raises:
            ConfigError: names the field.
        """
        await self._open("model.path", "check_model")
        await self._open("data.train", "open_train")
        if self._spec.data.eval is not None:
            await self._open("data.eval", "open_eval")

    async def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            await self._child.close()

    async def training(self, ordinal: int) -> TaskRecord:
        """The task of a draw of the training source.

        Raises:
            TaskNotMade: this one cannot be made.
            DataError: it was not made in time, or its making ended the process: no task can be relied on.
        """
        async with self._turn:
            return await self._take(self._train, ordinal, lambda count: list(range(ordinal, ordinal + count)))

    async def evaluation(self, number: int) -> TaskRecord:
        """The held-out task of this number.

        Raises:
            TaskNotMade, DataError: as `training`.
        """
        async with self._turn:
            return await self._take(self._eval, number, lambda count: self._rows[number : number + count])

    async def _take(self, ahead: _Ahead, number: int, names: Callable[[int], list[int]]) -> TaskRecord:
        """The task of this number, made ahead or now, and then with those after it, as many as came in time before.

        `names` gives what the child knows so many of them by, from this one on.
        """
        if number not in ahead.made:
            again = 0 < number < ahead.reached
            wanted = names(1 if again else ahead.at_once)
            made = await self._ask(ahead.where, ahead.method, wanted)
            if not again:
                ahead.made.clear()
                ahead.reached = number + len(made)
                ahead.at_once = min(2 * len(made), AHEAD) if len(made) == len(wanted) else len(made)
            ahead.made |= {number + place: found for place, found in enumerate(made)}
        _, payload, reason = ahead.made.pop(number)
        if payload is None:
            raise TaskNotMade(reason)
        return unpack(payload)

    async def _ask(self, field: str, method: str, wanted: list[int]) -> list[Made]:
        """What is made of these, the first at least. After a child that hung or died the first is asked for alone."""
        lost = 0
        while True:
            try:
                return list(await (await self._ready()).request(method, wanted, SOON_S, wall_s=TASK_S))
            except ChildLost as error:
                lost += 1
                if lost == LOSSES:
                    raise DataError(
                        f"{await self._name(field, wanted[0])} was not made: {error}", field=field
                    ) from error
            except (ChildTimeout, ChildDied) as error:
                await self.close()
                if len(wanted) == 1:
                    why = f"within {TASK_S:.0f} s" if isinstance(error, ChildTimeout) else f"by a process: it {error}"
                    raise DataError(f"{await self._name(field, wanted[0])} was not made {why}", field=field) from error
                log.warning("%s: the making of tasks %s: each is asked for alone", field, error)
                wanted = wanted[:1]

    async def _name(self, field: str, wanted: int) -> str:
        """The task's name for people: its index in the source."""
        if field == "data.eval":
            return f"task {wanted}"
        try:
            return f"task {await (await self._ready()).request('index', wanted, wall_s=OPEN_S)}"
        except MillraceError:
            return f"the task of draw {wanted}"

    async def _open(self, field: str, method: str) -> Any:  # noqa: ANN401  what the method answers
        for last in (False, True):
            try:
                return await (await self._ready()).request(method, wall_s=OPEN_S)
            except ChildTimeout as error:
                raise DataError(f"was not read within {OPEN_S:.0f} s", field=field) from error
            except ChildLost:
                if last:
                    raise
            except ChildDied as error:
                raise DataError(f"cannot be read: it {error}", field=field) from error
            except SandboxError as error:
                raise DataError(f"cannot be read: {' '.join(str(error).split())}", field=field) from error
        return None

    async def _ready(self) -> Child:
        """The child, or a new one, in which nothing is open yet."""
        if self._child is None or not self._child.alive:
            arguments = self._spec.model_dump_json(), self._settings.public()
            self._child = await self._sandbox.spawn(SOURCES, *arguments, limits=limits_of(self._spec, self._settings))
        return self._child
