"""Imported configurations: all that they say of the algorithm trains here, once sizes, model and data are those of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.imports.convert import Request, convert
from tests.e2e.conftest import MODEL, Stack
from tests.e2e.test_loop import check_accounting, ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILES = Path(__file__).parents[1] / "unit/cli/imports/files"
STEPS = 2
TINY = (
    f"model.path={MODEL}", "model.dtype=float32", "model.max_model_len=32", "rollout.rollout_max_tokens=5",
    "rollout.tensor_parallel_size=1", "rollout.gpu_memory_utilization=0.2", "rollout.max_concurrent_groups=16",
    "algorithm.filter_groups_train_batch_size=16", f"learner.steps={STEPS}", "learner.max_tokens_per_micro_batch=4096",
    "learner.mini_batch_size=8", "learner.tensor_parallel_size=1", "learner.data_parallel_size=1", "learner.sequence_parallel=false",
)  # fmt: skip
MINDSPEED = ("reward.verifiers={'*': reasoning_gym}", "algorithm.overlong_buffer=1")
VERL = (f"critic.path={MODEL}", "eval.tasks=8")


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        (Request(file=FILES / "dapo_mindspeed.yaml"), MINDSPEED),
        (Request(script=FILES / "ppo_gsm8k_verl.sh", rows=7473), VERL),
    ],
    ids=["mindspeed-dapo", "verl-ppo"],
)
def test_an_imported_configuration_trains_at_tiny_sizes(
    stack: Stack, demo_spec: dict[str, Any], request_: Request, changes: tuple[str, ...]
) -> None:
    sized = Request(file=request_.file, script=request_.script, rows=request_.rows, changes=(*TINY, *changes))
    spec = yaml.safe_load(convert(sized, {"HOME": "/home/user"}).text)
    spec["data"] = {name: demo_spec["data"][name] for name in spec["data"] if name != "shuffle"}
    record = stack.wait(stack.client.submit(spec)["id"], until=ended, timeout_s=400)
    assert (record["state"], record["step"]) == ("succeeded", STEPS)
    check_accounting(record)
