"""A job whose reward is a verifier's, a judge's and a reward model's, on the real stack."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from services.common.service.process_tree import is_running
from services.common.streams.types import VerdictStatus
from tests.e2e.conftest import MODELS, Stack
from tests.e2e.test_loop import check_accounting, ended, journal_groups
from tests.judge_server import JudgeServer, judge_thread
from tests.tiny_classifier import SCORE, write_tiny_classifier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARD_MODEL = MODELS / "tiny-reward"
STEPS = 3
REWARD: dict[str, Any] = {
    "verifiers": {"*": "all"},
    "rubrics": {
        "all": {
            "verifier_function": ["reasoning_gym", "graded", "scored"], "verifier_weight": [1.0, 0.5, 0.1],
            "accuracy_of": "reasoning_gym",
        }
    },
    "judges": {"graded": {"endpoint": "near", "template": "{question}|{reference}|{response}", "requests_at_once": 32}},
    "reward_models": {"scored": {"path": "tiny-reward"}},
}  # fmt: skip


def grade(request: dict[str, Any]) -> str:
    """The stand-in of a judge: the closer, the better."""
    _, reference, response = request["messages"][0]["content"].rsplit("|", 2)
    try:
        distance = abs(int(response) - int(reference))
    except ValueError:
        return "Not a number. [[1]]"
    return f"Off by {distance}. [[{max(1, 10 - distance)}]]"


@pytest.fixture(scope="module", autouse=True)
def judge() -> Iterator[JudgeServer]:
    """The judge's server, which the stack knows, and a reward model below its model roots."""
    shutil.rmtree(REWARD_MODEL, ignore_errors=True)
    write_tiny_classifier(REWARD_MODEL)
    patch = pytest.MonkeyPatch()
    with judge_thread() as server:
        server.reply = grade
        patch.setenv("MILLRACE_JUDGE_ENDPOINTS", json.dumps({"near": {"url": server.url, "model": "stand-in"}}))
        patch.setenv("MILLRACE_REWARD_MODEL_THREADS", "1")
        yield server
        patch.undo()


def reward_models(stack: Stack) -> list[psutil.Process]:
    """The processes of reward models that run now."""
    below = psutil.Process(stack.pid("reward-0")).children()
    (forkserver,) = [process for process in below if "reward-model" in process.cmdline()]
    return [process for process in forkserver.children() if is_running(process)]


def test_every_reward_is_the_sum_of_what_verifier_judge_and_reward_model_say(
    judge: JudgeServer, stack: Stack, demo_spec: dict[str, Any]
) -> None:
    demo_spec["learner"]["steps"] = STEPS
    demo_spec["algorithm"]["filter_groups_train_batch_size"] = 16
    demo_spec["eval"] = {"enabled": False}
    demo_spec["reward"] = REWARD
    job_id = stack.client.submit(demo_spec)["id"]
    stack.wait(job_id, until=lambda record: record["step"] >= 1, timeout_s=240)
    (worker,) = [worker for worker in stack.client.workers() if worker["kind"] == "reward"]
    assert worker["detail"]["reward_models"] == len(reward_models(stack)) == 1
    assert worker["detail"]["reward_models_mib"] > 50
    record = stack.wait(job_id, until=ended, timeout_s=240)

    check_accounting(record)
    assert record["groups"]["failed"] == 0
    rewards = set()
    for groups in journal_groups(stack, job_id).values():
        for verdict in (verdict for group in groups for verdict in group.verdicts):
            assert (verdict.status, verdict.verifier) == (VerdictStatus.SCORED, "all")
            said = [part.split(" × ")[0] for part in verdict.detail.split("; ")]
            parts = {name: float(value) for name, value in (each.split(": ") for each in said)}
            assert parts.keys() == {"reasoning_gym", "graded", "scored"}
            assert abs(parts["scored"]) == pytest.approx(SCORE, abs=1e-3)
            total = parts["reasoning_gym"] + 0.5 * parts["graded"] + 0.1 * parts["scored"]
            assert verdict.reward == pytest.approx(total, abs=1e-3)
            assert verdict.accuracy in {0.0, 1.0}
            rewards.add(verdict.reward)
    assert len(rewards) > 3, "the judge tells near from far"
    assert len(judge.requests) > 100
    deadline = time.monotonic() + 20.0
    while reward_models(stack):
        assert time.monotonic() < deadline, "the reward model's process outlives its job"
        time.sleep(0.2)
