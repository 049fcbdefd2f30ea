"""The whole stack on real parts while its Redis is emptied, and while it is killed: jobs go on and end, and every group has one fate."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import redis

from tests.e2e.conftest import Stack
from tests.e2e.test_loop import check_accounting, ended, journal_groups

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 16


def reached(step: int, record: dict[str, Any]) -> bool:
    return bool(record["step"] >= step)


def check(stack: Stack, record: dict[str, Any], spec: dict[str, Any]) -> None:
    check_accounting(record)
    assert record["groups"]["trained"] == STEPS * spec["algorithm"]["filter_groups_train_batch_size"]
    assert record["groups"]["failed"] == 0
    groups = [group for groups in journal_groups(stack, record["id"]).values() for group in groups]
    assert len({group.group.task.group_id for group in groups}) == len(groups) == record["groups"]["trained"]
    assert [step["step"] for step in stack.client.steps(record["id"])] == list(range(1, STEPS + 1))


def test_a_redis_emptied_during_a_job_loses_no_job_and_no_group(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["eval"] = {"enabled": False}
    demo_spec["learner"]["steps"] = STEPS
    job_id = stack.client.submit(demo_spec, idempotency_key="first")["id"]
    waiting = stack.client.submit(demo_spec)["id"]
    stack.client.cancel(stack.client.submit(demo_spec)["id"])
    listed = [job["id"] for job in stack.client.jobs()]
    for step in (2, 8):
        stack.wait(job_id, until=partial(reached, step), timeout_s=300)
        with redis.Redis.from_url(stack.state.redis_url) as direct:
            direct.flushall()
        back = stack.wait_for_jobs(listed, timeout_s=10)
        assert [job["id"] for job in back] == listed
        assert stack.client.submit(demo_spec, idempotency_key="first")["id"] == job_id
    check(stack, stack.wait(job_id, until=ended, timeout_s=300), demo_spec)
    check(stack, stack.wait(waiting, until=ended, timeout_s=300), demo_spec)


def test_a_killed_redis_costs_no_group(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["eval"] = {"enabled": False}
    demo_spec["learner"]["steps"] = STEPS
    job_id = stack.client.submit(demo_spec)["id"]
    for step in (2, 8):
        stack.wait(job_id, until=partial(reached, step), timeout_s=300)
        os.kill(stack.pid("redis"), signal.SIGKILL)
    check(stack, stack.wait(job_id, until=ended, timeout_s=300), demo_spec)
