"""Jobs on the real stack whose environments have packages of their own: the environment service runs with another Python.

Run by `make test-environments`, which makes that Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODELS, ROOT, Stack, running_stack
from tests.e2e.test_loop import check_accounting, ended, journal_groups
from tests.environments.echo_process import echo_server

PYTHON = Path(os.environ.get("MILLRACE_ENVIRONMENT_PYTHON", "nowhere"))
pytestmark = [pytest.mark.skipif(not PYTHON.is_file(), reason="make test-environments"), pytest.mark.timeout(900)]

MODEL = MODELS / "smollm2-135m-instruct"
STEPS, GROUPS, GROUP_SIZE, TURNS = 2, 4, 4, 3
PLACES = GROUPS * GROUP_SIZE
"""Of the server: as many as episodes are in flight."""
GAMES = ("FrozenLake-v0", "TowerOfHanoi-v0", "Mastermind-v0")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The OpenEnv server's host and port."""
    with echo_server(PYTHON, PLACES) as where:
        yield where


@pytest.fixture(scope="module")
def stack(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose jobs may reach the server."""
    subprocess.run([sys.executable, "-m", "examples.demo.models", "smollm2", "--out", MODEL], cwd=ROOT, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_OPENENV_HOSTS", server)
        with running_stack(tmp_path_factory.mktemp("stack")) as running:
            yield running


def spec(name: str, config: dict[str, Any]) -> dict[str, Any]:
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
        "learner": {"steps": STEPS, "lr": 1e-5, "max_tokens_per_micro_batch": 4096, "threads_per_rank": 1},
        "eval": {"enabled": False},
    }  # fmt: skip


def run(stack: Stack, name: str, config: dict[str, Any]) -> list[Any]:
    """Runs a job to its end; the rollouts that it trained."""
    job_id = stack.client.submit(spec(name, config))["id"]
    record = stack.wait(job_id, until=ended, timeout_s=600)
    check_accounting(record)
    assert record["groups"]["trained"] == STEPS * GROUPS
    assert record["groups"]["failed"] == 0
    assert all(step["turns_mean"] > 1 for step in stack.client.steps(job_id))
    trained = [group for groups in journal_groups(stack, job_id).values() for group in groups]
    rollouts = [rollout for group in trained for rollout in group.group.rollouts]
    assert all(turn.observed > 0 for rollout in rollouts for turn in rollout.turns[1:])
    rewards = [verdict.reward for group in trained for verdict in group.verdicts]
    assert [rollout.outcome.reward if rollout.outcome else 0.0 for rollout in rollouts] == pytest.approx(rewards)
    return rollouts


def test_a_job_trains_on_an_openenv_server(stack: Stack, server: str) -> None:
    rollouts = run(stack, "openenv", {"url": f"http://{server}", "turns": TURNS})
    assert {len(rollout.turns) for rollout in rollouts} <= {1, 2, 3}
    assert len({rollout.outcome.reward for rollout in rollouts if rollout.outcome}) > STEPS * GROUPS, "by its length"


@pytest.mark.parametrize("game", GAMES)
def test_a_job_trains_on_a_game_of_textarena(stack: Stack, game: str) -> None:
    rollouts = run(stack, "textarena", {"game": game})
    assert max(len(rollout.turns) for rollout in rollouts) > 1
