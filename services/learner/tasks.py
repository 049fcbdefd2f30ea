"""From ordinals to tasks: which prompt a group asks, as a pure function of the job's seed and the ordinal."""

from __future__ import annotations

from services.common.data import TaskRecord, TaskSource
from services.common.data.order import task_index
from services.common.spec import JobSpec
from services.common.types import Purpose, Task
from services.learner.held_out import HeldOut


class TaskFactory:
    """Makes the tasks of one job."""

    def __init__(
        self, job_id: str, spec: JobSpec, *, lineage: int, train: TaskSource, held_out: HeldOut | None
    ) -> None:
        """The sources are opened already, so that nothing here can fail for a person's mistake."""
        self._job_id = job_id
        self._spec = spec
        self.lineage = lineage
        self.offset = 0
        """Tasks of the data's order that a job before this one has used."""
        self._train = train
        self._held_out = held_out

    @property
    def held_out_tasks(self) -> int:
        """Tasks of one evaluation."""
        return len(self._held_out) if self._held_out is not None else 0

    def training(self, group_id: int, attempt: int, policy_version: int) -> Task:
        """The task of a training group; the same ordinal always asks the same."""
        index = task_index(self._spec.data.seed, self.offset + group_id, len(self._train), self._spec.data.shuffle)
        rollout = self._spec.rollout
        return self._task(
            self._train[index], Purpose.TRAIN, group_id, attempt, policy_version, group_size=rollout.group_size,
            temperature=rollout.temperature, timeout_s=rollout.group_timeout_s, rollout_timeout_s=rollout.rollout_timeout_s,
            min_group_size=rollout.fewest_rollouts,
        )  # fmt: skip

    def evaluation(self, group_id: int, index: int, attempt: int, policy_version: int) -> Task:
        """The task of an evaluation group: held-out row `index`. It needs all of its rollouts: pass@k of fewer would not be pass@k."""
        if self._held_out is None:
            raise ValueError("the job has no held-out tasks")
        evaluation = self._spec.eval
        return self._task(
            self._held_out[index], Purpose.EVAL, group_id, attempt, policy_version, group_size=evaluation.samples,
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
