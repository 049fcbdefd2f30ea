"""The whole loop on real vLLM, Megatron-core, Redis and gRPC: it learns, and its invariants hold."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import psutil
import pytest

from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.storage.journal import Journal
from tests.e2e.conftest import EXPERTS, Stack, make_model

pytestmark = pytest.mark.timeout(900)  # the first test also makes the model and starts the stack

SAME_WEIGHTS_KL_BOUND = 1e-5
"""Mismatch KL while engine and learner hold the same float32 weights."""

TYPICAL_KL_BOUND = 0.02
"""Mismatch KL of the median step, whose samples are up to two steps old, while the demo's learning rate warms up."""

ANY_STEP_KL_BOUND = 1.0
"""Of every step: one token that has become unlikely can make most of a batch's mean. With weights of another model it is above 5."""

FATES = ("trained", "degenerate", "stale", "failed", "cancelled")


def ended(record: dict[str, Any]) -> bool:
    return bool(record["state"] == "succeeded")


def check_accounting(record: dict[str, Any]) -> None:
    groups = record["groups"]
    assert groups["active"] == 0
    assert sum(groups[fate] for fate in FATES) == groups["issued"]


def journal_groups(stack: Stack, job_id: str) -> dict[int, list[ScoredGroup]]:
    """What each step trained, from the journal on disk; its last record may carry fates only."""
    records = [record for record in Journal(stack.home / "jobs" / job_id / "journal").records() if record.groups]
    return {
        record.step: [decode(ScoredGroup, payload, MIN_ENTRY_BYTES) for payload in record.groups] for record in records
    }


def check_invariants(stack: Stack, spec: dict[str, Any], job_id: str, record: dict[str, Any]) -> None:
    """What holds of every job that ran to its end undisturbed."""
    steps = stack.client.steps(job_id)
    bound, last = spec["off_policy"]["max_off_policy_steps"], spec["learner"]["steps"]
    assert [step["step"] for step in steps] == list(range(1, last + 1))

    check_accounting(record)
    assert record["groups"]["trained"] == last * spec["algorithm"]["filter_groups_train_batch_size"]
    assert record["groups"]["stale"] == record["groups"]["failed"] == 0

    assert max(step["policy_age_max"] for step in steps) <= bound
    mismatch = [step["mismatch_kl_k3"] for step in steps]
    assert median(mismatch) < TYPICAL_KL_BOUND
    assert max(mismatch) < ANY_STEP_KL_BOUND
    assert steps[0]["mismatch_kl_k3"] < SAME_WEIGHTS_KL_BOUND  # nothing was trained before
    assert all(step["pause_s"] > 0 for step in steps[3:])

    trained_ids: set[int] = set()
    newest = []
    for step, groups in journal_groups(stack, job_id).items():
        ids = {group.group.task.group_id for group in groups}
        assert not ids & trained_ids, "a group was trained twice"
        trained_ids |= ids
        assert all(step - 1 - bound <= group.group.min_policy_version for group in groups)
        assert all(group.group.max_policy_version <= step - 1 for group in groups)
        newest.append(max(group.group.max_policy_version for group in groups))
    assert all(a <= b for a, b in pairwise(newest)), "versions in the samples only grow"
    assert newest[-1] > 0


def test_every_invariant_holds(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["learner"]["steps"] = last = 6
    job_id = stack.client.submit(demo_spec)["id"]
    check_invariants(stack, demo_spec, job_id, stack.wait(job_id, until=ended, timeout_s=420))

    first, *_, final = stack.client.history(job_id)["evals"]
    assert (first["min_policy_version"], first["max_policy_version"]) == (0, 0)
    assert final["min_policy_version"] == final["max_policy_version"] == last

    samples = stack.client.rollouts(job_id, 3)
    assert len(samples) == 3
    said = [rollout["text"] for sample in samples for rollout in sample["rollouts"]]
    assert sum(map(bool, said)) > len(said) / 2, "a policy may stop at once, but not mostly"


@pytest.mark.slow
def test_the_policy_learns(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["learner"]["steps"] = 64  # the first 20 warm up; after them a run gains 0.06 to 0.08
    job_id = stack.client.submit(demo_spec)["id"]
    check_invariants(stack, demo_spec, job_id, stack.wait(job_id, until=ended, timeout_s=420))
    history = stack.client.history(job_id)
    rewards = [step["reward"] for step in history["steps"] if step["reward"] is not None]
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.03, rewards  # means of about 5,000 rollouts each
    assert history["evals"][-1]["avg_at_k"] > history["evals"][0]["avg_at_k"], history["evals"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 8}}], ids=["weights", "adapters"])
def test_every_invariant_holds_on_fsdp2_and_the_policy_learns(
    stack: Stack, demo_spec: dict[str, Any], model: dict[str, Any]
) -> None:
    demo_spec["model"] |= model
    demo_spec["learner"] |= {"steps": 64, "backend": "fsdp2", "lr": 2e-3 if model else demo_spec["learner"]["lr"]}
    job_id = stack.client.submit(demo_spec)["id"]
    check_invariants(stack, demo_spec, job_id, stack.wait(job_id, until=ended, timeout_s=420))
    history = stack.client.history(job_id)
    assert history["evals"][-1]["avg_at_k"] > history["evals"][0]["avg_at_k"], history["evals"]


@pytest.mark.slow
def test_every_invariant_holds_for_a_mixture_of_experts_on_two_ranks(stack: Stack, demo_spec: dict[str, Any]) -> None:
    make_model(EXPERTS, "experts")
    demo_spec["model"]["path"] = str(EXPERTS)
    demo_spec["learner"] |= {"steps": 12, "data_parallel_size": 2, "expert_parallel_size": 2}
    job_id = stack.client.submit(demo_spec)["id"]
    check_invariants(stack, demo_spec, job_id, stack.wait(job_id, until=ended, timeout_s=420))
    assert all(step["router_load_max"] >= 1 >= step["router_load_min"] for step in stack.client.steps(job_id))


@pytest.mark.slow
def test_a_killed_rank_of_the_reference_alone_costs_no_group(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["algorithm"] |= {"preset": "ppo", "kl_coefficient": 0.01}
    demo_spec |= {"critic": {"placement": "own"}, "reference": {"placement": "own"}, "eval": {"enabled": False}}
    demo_spec["learner"]["steps"] = last = 20
    demo_spec["checkpoint"]["interval_steps"] = 5
    job_id = stack.client.submit(demo_spec)["id"]
    stack.wait(job_id, until=lambda record: record["step"] >= 7, timeout_s=300)
    *_, rank = ranks = rank_pids(stack.pid("learner-0"))
    assert len(ranks) == 3
    os.kill(rank, signal.SIGKILL)
    record = stack.wait(job_id, until=ended, timeout_s=420)
    check_accounting(record)
    assert record["groups"]["trained"] == last * demo_spec["algorithm"]["filter_groups_train_batch_size"]
    steps = stack.client.steps(job_id)
    assert [step["step"] for step in steps] == list(range(1, last + 1))
    assert {step["lineage"] for step in steps} == {1}
    assert all(step["value_loss"] is not None and step["reference_kl"] is not None for step in steps)


@pytest.mark.slow
def test_every_invariant_holds_where_engine_and_learner_take_turns(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["placement"] = {"rollout": "colocated"}
    demo_spec["learner"] |= {"steps": 20, "threads_per_rank": 0}
    job_id = stack.client.submit(demo_spec)["id"]
    check_invariants(stack, demo_spec, job_id, stack.wait(job_id, until=ended, timeout_s=420))
    logs = "".join(path.read_text() for path in (stack.home / "logs").glob("learner*.log"))
    assert "sample still" not in logs, "a step was trained while an engine sampled"


@pytest.mark.slow
def test_synchronous_mode_trains_on_the_current_policy_only(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["off_policy"] = {"max_off_policy_steps": 0}
    demo_spec["learner"]["steps"] = 4
    demo_spec["algorithm"]["filter_groups_train_batch_size"] = 16
    demo_spec["eval"] = {"enabled": False}
    job_id = stack.client.submit(demo_spec)["id"]
    record = stack.wait(job_id, until=ended, timeout_s=240)
    check_accounting(record)
    assert record["groups"]["stale"] == 0
    for step, groups in journal_groups(stack, job_id).items():
        assert {g.group.min_policy_version for g in groups} == {step - 1}
        assert {g.group.max_policy_version for g in groups} == {step - 1}
    assert all(step["mismatch_kl_k3"] < SAME_WEIGHTS_KL_BOUND for step in stack.client.steps(job_id))


@pytest.mark.slow
def test_a_killed_rollout_server_costs_no_group(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["eval"] = {"enabled": False}
    demo_spec["learner"]["steps"] = 20
    job_id = stack.client.submit(demo_spec)["id"]
    stack.wait(job_id, until=lambda record: record["step"] >= 5, timeout_s=240)
    killed = stack.pid("rollout-0")
    os.kill(killed, signal.SIGKILL)
    record = stack.wait(job_id, until=ended, timeout_s=300)
    assert stack.pid("rollout-0") != killed
    check_accounting(record)
    assert record["groups"]["trained"] == 20 * demo_spec["algorithm"]["filter_groups_train_batch_size"]
    assert record["groups"]["failed"] == 0
    assert max(step["policy_age_max"] for step in stack.client.steps(job_id)) <= 2
    everyone = [g for groups in journal_groups(stack, job_id).values() for g in groups]
    assert len({g.group.task.group_id for g in everyone}) == len(everyone)
    assert all(g.group.min_policy_version >= g.group.task.min_policy_version for g in everyone)


@pytest.mark.slow
def test_a_killed_learner_rank_resumes_from_checkpoint_and_journal(stack: Stack, demo_spec: dict[str, Any]) -> None:
    demo_spec["eval"] = {"enabled": False}
    demo_spec["learner"]["steps"] = 16
    job_id = stack.client.submit(demo_spec)["id"]
    stack.wait(job_id, until=lambda record: record["step"] >= 12, timeout_s=240)
    (rank,) = rank_pids(stack.pid("learner-0"))
    os.kill(rank, signal.SIGKILL)
    record = stack.wait(job_id, until=ended, timeout_s=300)
    check_accounting(record)
    groups = [group for groups in journal_groups(stack, job_id).values() for group in groups]
    assert len({group.group.task.group_id for group in groups}) == len(groups) == record["groups"]["trained"]
    assert [step["step"] for step in stack.client.steps(job_id)] == list(range(1, 17))
    log = (stack.home / "logs" / "learner-0.log").read_text()
    assert "resuming from the checkpoint of step 10" in log
    assert "training step 11 again from the journal" in log


def rank_pids(agent: int) -> list[int]:
    """The processes of the ranks below the learner's agent, in their order."""
    below = {process.pid: process.cmdline() for process in psutil.Process(agent).children(recursive=True)}
    return sorted(
        pid
        for pid, line in below.items()
        if line[-1:] == ["services.learner.rank"] and "services.learner.ranks.launch" not in line
    )
