"""Jobs on the real stack whose environments have packages of their own: the environment service runs with another Python.

Run by `make test-environments`, which makes that Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODELS, ROOT, Stack, running_stack
from tests.e2e.test_loop import check_accounting, ended, journal_groups
from tests.environments.echo_process import echo_server, free_address

PYTHON = Path(os.environ.get("MILLRACE_ENVIRONMENT_PYTHON", "nowhere"))
pytestmark = [pytest.mark.skipif(not PYTHON.is_file(), reason="make test-environments"), pytest.mark.timeout(900)]

MODEL = MODELS / "smollm2-135m-instruct"
STEPS, GROUPS, GROUP_SIZE, TURNS = 2, 4, 4, 3
PLACES = 2 * GROUP_SIZE + 1
"""Of the server: fewer than the engine has room for, so that groups wait for them."""
GAMES = ("FrozenLake-v0", "TowerOfHanoi-v0", "Mastermind-v0")


@pytest.fixture(scope="module")
def server() -> str:
    """The OpenEnv server's host and port, once it runs."""
    return free_address()


@pytest.fixture(scope="module")
def stack(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose jobs may reach the server."""
    subprocess.run([sys.executable, "-m", "examples.demo.models", "smollm2", "--out", MODEL], cwd=ROOT, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_OPENENV_HOSTS", server)
        with running_stack(tmp_path_factory.mktemp("stack")) as running:
            yield running


def spec(name: str, config: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """A job of a few steps on episodes of this environment."""
    return {
        "name": name,
        "model": {"path": str(MODEL), "dtype": "float32", "max_model_len": 2048},
        "data": {"train": {"source": f"environment:{name}", "config": config, "size": 100, "seed": 0}},
        "environment": {
            "max_turns": TURNS, "max_turn_tokens": 12, "max_observation_tokens": 768, "step_timeout_s": 30.0
        },
        "rollout": {"group_size": GROUP_SIZE, "rollout_max_tokens": 1024, "max_concurrent_groups": GROUPS},
        "algorithm": {"filter_groups_train_batch_size": GROUPS, "filter_groups_enable": False},
        "learner": {"steps": steps, "lr": 1e-5, "max_tokens_per_micro_batch": 2048, "threads_per_rank": 1},
        "eval": {"enabled": False},
    }  # fmt: skip


def run(stack: Stack, name: str, config: dict[str, Any]) -> list[Any]:
    """Runs a job to its end; the rollouts that it trained."""
    job_id = stack.client.submit(spec(name, config))["id"]
    return trained(stack, job_id, stack.wait(job_id, until=ended, timeout_s=600))


def trained(stack: Stack, job_id: str, record: dict[str, Any]) -> list[Any]:
    """The rollouts that an ended job trained, none of whose groups failed."""
    check_accounting(record)
    assert record["groups"]["trained"] == record["step"] * GROUPS
    assert record["groups"]["failed"] == 0
    assert all(step["turns_mean"] > 1 for step in stack.client.steps(job_id))
    groups = [group for groups in journal_groups(stack, job_id).values() for group in groups]
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    assert all(turn.observed > 0 for rollout in rollouts for turn in rollout.turns[1:])
    rewards = [verdict.reward for group in groups for verdict in group.verdicts]
    assert [rollout.outcome.reward if rollout.outcome else 0.0 for rollout in rollouts] == pytest.approx(rewards)
    return rollouts


def test_a_job_trains_on_an_openenv_server(stack: Stack, server: str) -> None:
    with echo_server(PYTHON, PLACES, server):
        rollouts = run(stack, "openenv", {"url": f"http://{server}", "turns": TURNS})
    assert {len(rollout.turns) for rollout in rollouts} <= {1, 2, 3}
    assert len({rollout.outcome.reward for rollout in rollouts if rollout.outcome}) > STEPS * GROUPS, "by its length"


def test_a_server_that_is_away_is_waited_for_and_costs_no_group(stack: Stack, server: str) -> None:
    with echo_server(PYTHON, PLACES, server):
        job_id = stack.client.submit(spec("openenv", {"url": f"http://{server}", "turns": TURNS}, steps=4))["id"]
        stack.wait(job_id, until=lambda record: record["step"] >= 1, timeout_s=300)
    stack.wait(job_id, until=lambda _: "cannot be reached" in troubles(stack), timeout_s=60)
    time.sleep(15.0)
    with echo_server(PYTHON, PLACES, server):
        trained(stack, job_id, stack.wait(job_id, until=ended, timeout_s=300))
    assert troubles(stack) == ""


def troubles(stack: Stack) -> str:
    """Why servers cannot work."""
    return "; ".join(str(worker["detail"].get("trouble", "")) for worker in stack.client.workers()).strip("; ")


@pytest.mark.parametrize("game", GAMES)
def test_a_job_trains_on_a_game_of_textarena(stack: Stack, game: str) -> None:
    rollouts = run(stack, "textarena", {"game": game})
    assert max(len(rollout.turns) for rollout in rollouts) > 1
