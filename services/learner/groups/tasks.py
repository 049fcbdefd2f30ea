"""Tasks for the rollout servers, by ordinal: the prompt of a group is a pure function of the job's seed and the ordinal."""

from __future__ import annotations

from services.common.data.record import TaskRecord
from services.common.spec.job import JobSpec
from services.common.streams.types import Purpose, Task
from services.learner.groups.data import JobData


class TaskFactory:
    """Factory of one job's tasks; `data` is open."""

    def __init__(self, job_id: str, spec: JobSpec, *, lineage: int, data: JobData) -> None:
        self._job_id, self._spec, self._data = job_id, spec, data
        self.lineage = lineage
        self.offset = 0
        """Tasks of the data's order that an earlier job has used."""

    @property
    def held_out_tasks(self) -> int:
        """Number of tasks of one evaluation."""
        return self._data.held_out_tasks

    async def training(self, group_id: int, attempt: int, policy_version: int) -> Task:
        """The task of a training group; the same ordinal always has the same prompt.

        Raises:
            TaskNotMade: this task cannot be made; others can.
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
        """The task of an evaluation group: held-out row `index`. Raises as `training`.

        It needs all its rollouts: pass@k of fewer would not be pass@k.
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
