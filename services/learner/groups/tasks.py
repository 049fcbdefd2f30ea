"""From ordinals to tasks: which prompt a group asks, as a pure function of the job's seed and the ordinal."""

from __future__ import annotations

from services.common.data.record import TaskRecord
from services.common.spec.job import JobSpec
from services.common.streams.types import Purpose, Task
from services.learner.groups.data import JobData


class TaskFactory:
    """Makes the tasks of one job."""

    def __init__(self, job_id: str, spec: JobSpec, *, lineage: int, data: JobData) -> None:
        """The job's data are open."""
        self._job_id = job_id
        self._spec = spec
        self.lineage = lineage
        self.offset = 0
        """Tasks of the data's order that a job before this one has used."""
        self._data = data

    @property
    def held_out_tasks(self) -> int:
        """Tasks of one evaluation."""
        return self._data.held_out_tasks

    async def training(self, group_id: int, attempt: int, policy_version: int) -> Task:
        """The task of a training group; the same ordinal always asks the same.

        Raises:
            TaskNotMade: it cannot be made; others may.
            DataError: no task can be made any more.
        """
        record = await self._data.training(self.offset + group_id)
        rollout = self._spec.rollout
        return self._task(
            record, Purpose.TRAIN, group_id, attempt, policy_version, group_size=rollout.group_size,
            temperature=rollout.temperature, timeout_s=rollout.group_timeout_s, rollout_timeout_s=rollout.rollout_timeout_s,
            min_group_size=rollout.fewest_rollouts,
        )  # fmt: skip

    async def evaluation(self, group_id: int, index: int, attempt: int, policy_version: int) -> Task:
        """The task of an evaluation group: held-out row `index`. It needs all of its rollouts: pass@k of fewer would not be pass@k.

        Raises:
            TaskNotMade, DataError: as `training`.
        """
        record = await self._data.evaluation(index)
        evaluation = self._spec.eval
        return self._task(
            record, Purpose.EVAL, group_id, attempt, policy_version, group_size=evaluation.samples,
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
        )
