"""Data of a job on the head's side: tasks by ordinal, prefetched from a child process that can be killed (`sources`).

ordinal ──► prefetched? ──► record
               │ no: the child makes as many as it can within PREFETCH_S
               └──► not in time, or the child died: a new child, this task alone ──► failed again: the job cannot go on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.config.settings import Settings
from services.common.data.bounds import MAX_TASKS
from services.common.data.environments import environment_call
from services.common.data.record import TaskRecord
from services.common.errors import ChildDied, ChildLost, ChildTimeout, DataError, MillraceError, SandboxError
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.spec.job import JobSpec
from services.common.streams.types import Purpose, Task
from services.learner.groups.sources import CHECK_S, Made, unpack

log = logging.getLogger(__name__)

SOURCES = "services.learner.groups.sources:Sources"

OPEN_S = 300.0
"""Time limit for opening a source, and for comparing the two."""
TASK_S = 30.0
"""Time limit for one task."""
PREFETCH_S = 0.25
"""Time in which a child makes further tasks than the requested one."""
MAX_PREFETCHED = 64
MAX_LOST_CHILDREN = 3
"""Children that may be killed from outside during one request."""
_MIB = 1024 * 1024
_MIN_MIB = 2048
_MIN_TASK_BYTES = 32
"""Of the shortest row of a file."""
_MEMORY_PER_TASK_BYTES = 40
"""Memory of one task in the orders of two epochs, which is all that grows with a source."""


class TaskNotMade(MillraceError):  # noqa: N818  an event
    """One task cannot be made: its group fails, and others can go on."""


def _limits(spec: JobSpec, settings: Settings) -> Limits:
    sources = [source for source in (spec.data.train, spec.data.eval) if source is not None]
    in_file = min(MAX_TASKS, settings.max_data_bytes // _MIN_TASK_BYTES)
    tasks = max(source.size or (in_file if source.procedural_task is None else 0) for source in sources)
    return Limits(wall_s=OPEN_S, memory_mib=_MIN_MIB + tasks * _MEMORY_PER_TASK_BYTES // _MIB)


@dataclass(slots=True)
class _Prefetch:
    """Tasks of one source that are made before they are requested."""

    source: str
    """The source's field in the spec."""
    method: str
    """Method of `Sources` that makes the tasks."""
    made: dict[int, Made] = field(default_factory=dict)
    reached: int = 0
    """Numbers below it were requested before: a task that is requested again is made alone. A new evaluation begins at 0."""
    count: int = 1
    """Tasks of the next request to the child."""


class JobData:
    """One job's tasks. Call `open` first, and `close` at the end; the owner of the sandbox stops it."""

    def __init__(self, sandbox: Sandbox, spec: JobSpec, settings: Settings) -> None:
        self._sandbox, self._spec, self._settings = sandbox, spec, settings
        self._child: Child | None = None
        self._rows: list[int] = []
        self._train = _Prefetch("data.train", "training")
        self._eval = _Prefetch("data.eval", "evaluation")
        self._turn = asyncio.Lock()
        self._is_open = False
        self.fingerprint = ""
        """Fingerprint of the training source."""

    @property
    def held_out_tasks(self) -> int:
        """Number of tasks of one evaluation."""
        return len(self._rows)

    async def open(self) -> None:
        """Opens the sources that the job needs; DataError names a field that cannot be opened, or not in time."""
        self.fingerprint = (await self._open("data.train", "open_train"))["fingerprint"]
        if self._spec.data.eval is not None and self._spec.eval.enabled:
            self._rows = await self._open("data.eval", "held_out")
        self._is_open = True

    async def check(self) -> None:
        """Reads the model's files and opens every source, before any rank is started; ConfigError names the field."""
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
            TaskNotMade: this task cannot be made.
            DataError: it was not made in time, or ended the child process: no task can be relied on.
        """
        async with self._turn:
            return await self._take(self._train, ordinal, lambda count: list(range(ordinal, ordinal + count)))

    async def evaluation(self, number: int) -> TaskRecord:
        """The held-out task of this number. Raises as `training`."""
        async with self._turn:
            return await self._take(self._eval, number, lambda count: self._rows[number : number + count])

    async def _take(self, prefetch: _Prefetch, number: int, ids: Callable[[int], list[int]]) -> TaskRecord:
        """The task of this number, prefetched or made now, together with as many after it as the last request suggests.

        `ids(count)`: the child's ids of `count` tasks from this one on.
        """
        if number not in prefetch.made:
            again = 0 < number < prefetch.reached
            wanted = ids(1 if again else prefetch.count)
            made = await self._make(prefetch.source, prefetch.method, wanted)
            if not again:
                prefetch.made.clear()
                prefetch.reached = number + len(made)
                prefetch.count = min(2 * len(made), MAX_PREFETCHED) if len(made) == len(wanted) else len(made)
            prefetch.made |= dict(enumerate(made, start=number))
        _, payload, reason = prefetch.made.pop(number)
        if payload is None:
            raise TaskNotMade(reason)
        return unpack(payload)

    async def _make(self, field: str, method: str, wanted: list[int]) -> list[Made]:
        """Makes these tasks, at least the first. After a child that hung or died, the first is requested alone."""
        lost = 0
        while True:
            try:
                return list(await (await self._running_child()).request(method, wanted, PREFETCH_S, wall_s=TASK_S))
            except ChildLost as error:
                lost += 1
                if lost == MAX_LOST_CHILDREN:
                    name = await self._task_name(field, wanted[0])
                    raise DataError(f"{name} was not made: {error}", field=field) from error
            except (ChildTimeout, ChildDied) as error:
                await self.close()
                if len(wanted) == 1:
                    name = await self._task_name(field, wanted[0])
                    why = f"within {TASK_S:.0f} s" if isinstance(error, ChildTimeout) else f"by a process: it {error}"
                    raise DataError(f"{name} was not made {why}", field=field) from error
                log.warning("%s: the making of tasks %s: each is asked for alone", field, error)
                wanted = wanted[:1]

    async def _task_name(self, field: str, wanted: int) -> str:
        """The task's name for users: its index in the source."""
        if field == "data.eval":
            return f"task {wanted}"
        try:
            return f"task {await (await self._running_child()).request('index', wanted, wall_s=OPEN_S)}"
        except MillraceError:
            return f"the task of draw {wanted}"

    async def _open(self, field: str, method: str) -> Any:  # noqa: ANN401  the method's own result
        for last in (False, True):
            try:
                return await (await self._running_child()).request(method, wall_s=OPEN_S)
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

    async def _running_child(self) -> Child:
        """The child, or a new one. One that replaces another opens the training source at once; DataError when that has changed."""
        if self._child is None or not self._child.alive:
            check_s = 0.0 if self._is_open else CHECK_S
            arguments = self._spec.model_dump_json(), self._settings.public(), check_s
            self._child = await self._sandbox.spawn(SOURCES, *arguments, limits=_limits(self._spec, self._settings))
            if self._is_open:
                found = await self._child.request("open_train", wall_s=OPEN_S)
                if found["fingerprint"] != self.fingerprint:
                    await self.close()
                    raise DataError("has changed since the job began: no task can be relied on", field="data.train")
        return self._child


class TaskFactory:
    """Factory of one job's tasks; `data` is open."""

    def __init__(self, job_id: str, spec: JobSpec, *, lineage: int, data: JobData) -> None:
        self._job_id, self._spec, self.data = job_id, spec, data
        self.lineage = lineage
        self.offset = 0
        """Tasks of the data's order that an earlier job has used."""

    async def training(self, group_id: int, attempt: int, policy_version: int) -> Task:
        """The task of a training group; the same ordinal always has the same prompt.

        Raises:
            TaskNotMade: this task cannot be made; others can.
            DataError: no task can be made any more.
        """
        record = await self.data.training(self.offset + group_id)
        rollout = self._spec.rollout
        return self._task(
            record, Purpose.TRAIN, group_id, attempt, policy_version, group_size=rollout.group_size,
            temperature=rollout.temperature, timeout_s=rollout.group_timeout_s, rollout_timeout_s=rollout.rollout_timeout_s,
            min_group_size=rollout.fewest_rollouts,
        )  # fmt: skip

    async def evaluation(self, group_id: int, index: int, policy_version: int) -> Task:
        """The task of an evaluation group: held-out row `index`. Raises as `training`.

        It needs all its rollouts: pass@k of fewer would not be pass@k.
        """
        record = await self.data.evaluation(index)
        evaluation = self._spec.eval
        return self._task(
            record, Purpose.EVAL, group_id, 1, policy_version, group_size=evaluation.samples,
            temperature=evaluation.temperature, timeout_s=evaluation.timeout_s, min_group_size=evaluation.samples,
        )  # fmt: skip

    def _task(
        self, record: TaskRecord, purpose: Purpose, group_id: int, attempt: int, policy_version: int, *,
        group_size: int, temperature: float, timeout_s: float, min_group_size: int, rollout_timeout_s: float | None = None,
    ) -> Task:  # fmt: skip
        return Task(
            job_id=self._job_id,
            lineage=self.lineage,
            group_id=group_id,
            attempt=attempt,
            purpose=purpose,
            prompt=record.prompt,
            data_source=record.data_source,
            ground_truth=record.ground_truth,
            extra_info=record.extra_info,
            group_size=group_size,
            temperature=temperature,
            max_tokens=self._spec.rollout.rollout_max_tokens,
            min_policy_version=policy_version,
            timeout_s=timeout_s,
            rollout_timeout_s=rollout_timeout_s,
            min_group_size=min_group_size,
            environment=environment_call(record, self._spec.environment),
        )
