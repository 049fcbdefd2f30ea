"""Jobs of a real learner that begin with each other's checkpoints, TP 2 → PP 2 → DP 2, with critic and reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.checkpoints.manifest import Checkpoint, read_manifest
from services.common.spec.job import JobSpec
from services.learner.conversion.report import inspect
from tests.integration.learner.test_replay import train
from tests.integration.rollout.conftest import write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("redis_url", ["embedded"], indirect=True, scope="session"),
    pytest.mark.timeout(1200),
]

CHAIN: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2, "use_distributed_optimizer": True},
    {},
]
"""Layouts, in their order."""
STEPS = 2
"""Of each job."""


def job(place: int, load: str | None) -> JobSpec:
    """The job in a layout, which goes on from another job."""
    return JobSpec.model_validate(
        {
            "name": "moving",
            "model": {"path": "tiny", "dtype": "float32"},
            "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 100}},
            "rollout": {"group_size": 4, "rollout_max_tokens": 8},
            "algorithm": {
                "preset": "ppo",
                "filter_groups_train_batch_size": 2,
                "kl_coefficient": 0.1,
                "kl_target": 0.01,
            },
            "learner": {"steps": STEPS * (place + 1), "lr": 1e-3, "lr_warmup_steps": 2, **CHAIN[place]},
            "critic": {"lr": 1e-3},
            "reference": {"rebase_interval_steps": 3},
            "checkpoint": {"interval_steps": 1000, "keep_last": 5, "load": load},
            "eval": {"enabled": False},
        }
    )


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Those of a job, the oldest first."""
    return [read_manifest(path) for path in sorted((folder / "checkpoints").glob("step-????????"))]


async def test_each_job_begins_with_the_weights_and_the_state_of_the_last(redis_url: str, tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    last: Checkpoint | None = None
    load: str | None = None
    for place in range(len(CHAIN)):
        load = await train(tmp_path, redis_url, job(place, load))
        folder = tmp_path / "jobs" / load
        held = checkpoints(folder)
        first, final = held[0], held[-1]
        assert final.step == STEPS * (place + 1)
        if last is not None:
            assert len(held) == 2
            assert first.step == last.step
            assert exported(first) == exported(last), "the same weights, byte for byte"
            assert inspect(first.path).roles["critic"].optimizer
            assert kl_coefficient(first) == kl_coefficient(last)
            assert exported(final) != exported(first)
        last = final


def exported(checkpoint: Checkpoint) -> bytes:
    return (checkpoint.path / "hf" / "model.safetensors").read_bytes()


def kl_coefficient(checkpoint: Checkpoint) -> float:
    """The adaptive β in the first rank's file."""
    data = (checkpoint.path / "rank-00000.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return float(json.loads(header["__metadata__"]["about"])["kl_coefficient"])
