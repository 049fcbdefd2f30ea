"""Job specs and judged groups for the tests of the learner's head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from services.common.spec.job import JobSpec
from services.common.streams.consumer import Entry
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from services.learner.groups.buffer import Judged
from services.learner.groups.validate import Limits

PROMPT = np.array([7, 8, 9], "<i4")
LIMITS = Limits(vocab_size=4096, positions=1024)
INFORMATIVE, DEGENERATE = (1.0, 0.0), (1.0, 1.0)


def job_spec(**sections: Any) -> JobSpec:
    """A small job; `sections` are those of the spec."""
    return JobSpec.model_validate(
        {"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}} | sections
    )


def make_spec(bsize: int = 2, k: int = 1, max_batches: int = 20, **algorithm: object) -> JobSpec:
    """A job of `bsize` groups a step and a bound of `k` on policy_age."""
    sizes = {"filter_groups_train_batch_size": bsize, "filter_groups_max_batches": max_batches}
    return job_spec(algorithm=sizes | algorithm, off_policy={"max_off_policy_steps": k})


def rollout(length: int, *versions: int) -> Rollout:
    """A response whose tokens are 100, 101, …, sampled by the versions in equal parts."""
    logprobs = -np.arange(1, length + 1, dtype="<f4") / 8
    spans = tuple(VersionSpan(length * n // len(versions), version) for n, version in enumerate(versions))
    return Rollout((100 + np.arange(length, dtype="<i4")).tobytes(), logprobs.tobytes(), "", FinishReason.STOP, spans)


def scored_group(
    group_id: int,
    rewards: Sequence[float | None],
    *,
    accuracies: Sequence[float | None] | None = None,
    lengths: Sequence[int] | None = None,
    versions: Sequence[int] = (0,),
    failure: str | None = None,
    permanent: bool = False,
    attempt: int = 1,
) -> ScoredGroup:
    """A group with one rollout per reward; None is a verdict without one. Accuracies are the rewards unless given."""
    task = Task(
        job_id="job", lineage=1, group_id=group_id, attempt=attempt, purpose=Purpose.TRAIN, prompt=(Message("user", "2 + 3 ="),),
        data_source="reasoning_gym:chain_sum", ground_truth="5", extra_info={}, group_size=max(len(rewards), 2),
        temperature=1.0, max_tokens=16, min_policy_version=versions[0], timeout_s=60.0,
    )  # fmt: skip
    lengths = [2] * len(rewards) if lengths is None else lengths
    rollouts = tuple(rollout(length, *versions) for length in lengths)
    group = RolloutGroup(task, "server", PROMPT.tobytes(), rollouts, 0.1, failure, permanent)
    return ScoredGroup(group, tuple(map(_verdict, rewards, accuracies if accuracies is not None else rewards)), 0.1)


def judged_group(group_id: int, rewards: Sequence[float | None], *, attempt: int = 1, **options: Any) -> Judged:
    """The same as it comes off the stream, under an entry of its own."""
    entry = Entry(f"{group_id}-{attempt - 1}", f"train:1:{group_id}:{attempt}", b"", 1)
    return Judged(scored_group(group_id, rewards, attempt=attempt, **options), b"", entry)


def _verdict(reward: float | None, accuracy: float | None) -> Verdict:
    status = VerdictStatus.TIMEOUT if reward is None else VerdictStatus.SCORED  # as releases before wrote it
    return Verdict(status, reward, accuracy, "exact")


def over_limit(judged: Judged, *, reward: float) -> Judged:
    """The group, its verdicts without a reward replaced by those of checks beyond their limit."""
    wrong = Verdict(VerdictStatus.TIMEOUT, reward, 0.0, "exact", "no verdict within 5 s")
    verdicts = tuple(wrong if verdict.reward is None else verdict for verdict in judged.scored.verdicts)
    return replace(judged, scored=replace(judged.scored, verdicts=verdicts))
