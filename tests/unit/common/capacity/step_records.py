"""Step records of a made-up run, for the tests of plans."""

from __future__ import annotations

from typing import Any

from services.common.jobs.step_record import StepRecord
from services.common.spec.job import JobSpec


def spec(**sections: Any) -> JobSpec:
    """A job of 32 groups a step, three policy versions and 24 groups at once."""
    document = {
        "model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "algorithm": {"filter_groups_train_batch_size": 32}, "off_policy": {"max_off_policy_steps": 2},
        "rollout": {"max_concurrent_groups": 24},
    }  # fmt: skip
    return JobSpec.model_validate(document | sections)


def records(count: int = 40, *, period_s: float = 1.0, wait_s: float = 0.6, **fields: Any) -> list[StepRecord]:
    """A run in which one server works all the time on 24 groups at once, and 40 groups are judged for 32 of a step."""
    usual: dict[str, Any] = {
        "wait_s": wait_s, "rollout_servers": 1, "rollout_busy_s": period_s, "groups_sampled": 40,
        "generate_s_mean": 24 * period_s / 40, "groups_trained": 32, "groups_judged": 40, "sequences": 256,
        "generated_tokens_per_s": 3200 / period_s, "policy_age_mean": 1.0, "policy_age_max": 1, "sync_s": 0.02,
        "pause_s": 0.0,
    }  # fmt: skip
    return [StepRecord(step=step, at=1000.0 + step * period_s, **(usual | fields)) for step in range(1, count + 1)]
