"""Settings of the training back ends: what does not go together is refused by the field's name, with what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.spec.job import JobSpec, parse_spec
from services.common.spec.learner import LearnerSpec

FSDP2 = {"backend": "fsdp2"}
OF_MEGATRON: dict[str, Any] = {
    "context_parallel_size": 2, "expert_parallel_size": 2, "router_aux_loss_coef": 0.01, "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
}  # fmt: skip
ADAPTERS = {"path": "tiny", "lora": {}}


def job(learner: dict[str, Any], model: dict[str, Any] | None = None) -> JobSpec:
    data = {"train": {"source": "tasks.jsonl"}}
    return parse_spec(json.dumps({"model": model or {"path": "tiny"}, "data": data, "learner": learner}))


@pytest.mark.parametrize(
    ("learner", "ranks", "row_multiple"),
    [
        ({}, 1, 1),
        ({"tensor_parallel_size": 2, "sequence_parallel": True}, 2, 2),
        ({"context_parallel_size": 4}, 4, 8),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, 4, 8),
        ({"data_parallel_size": 4, "expert_parallel_size": 2}, 4, 1),
        ({"data_parallel_size": 2, "context_parallel_size": 2, "expert_parallel_size": 4}, 4, 4),
        ({"data_parallel_size": 2, "expert_parallel_size": 2, "router_aux_loss_coef": 0.01}, 2, 1),
        (FSDP2 | {"data_parallel_size": 8, "fsdp_size": 2}, 8, 1),
        (FSDP2 | {"data_parallel_size": 3}, 3, 1),
    ],
)
def test_sizes_that_go_together_make_the_ranks_and_what_divides_a_row(
    learner: dict[str, Any], ranks: int, row_multiple: int
) -> None:
    found = job(learner)
    assert (found.world_size, found.learner.row_multiple) == (ranks, row_multiple)


@pytest.mark.parametrize(
    ("learner", "field", "said"),
    [
        ({"fsdp_size": 2}, "fsdp_size", "is a setting of backend fsdp2: leave it out, or set learner.backend to fsdp2"),
        (FSDP2 | {"data_parallel_size": 4, "fsdp_size": 3}, "fsdp_size", "3 does not divide data_parallel_size (4)"),
        (FSDP2 | {"data_parallel_size": 2, "fsdp_size": 4}, "fsdp_size", "4 does not divide data_parallel_size (2)"),
        (FSDP2 | {"fsdp_size": 0}, "fsdp_size", "greater than or equal to 1"),
        ({"context_parallel_size": 65}, "context_parallel_size", "less than or equal to 64"),
        ({"expert_parallel_size": 2}, "expert_parallel_size", "2 does not divide data_parallel_size × context_parallel_size (1)"),
        ({"data_parallel_size": 4, "expert_parallel_size": 3}, "expert_parallel_size", "3 does not divide"),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 4}, "expert_parallel_size", "4 does not divide"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef", "greater than or equal to 0"),
        ({"router_aux_loss_coef": 0.1, "shared_prompts": False}, "router_aux_loss_coef", "set shared_prompts, or leave it out"),
        ({"backend": "deepspeed"}, "backend", "'megatron' or 'fsdp2'"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_are_refused_by_name(learner: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job(learner)
    [problem] = refused.value.problems
    assert problem.field == f"learner.{field}"
    assert said in problem.message


@pytest.mark.parametrize(("name", "value"), OF_MEGATRON.items())
def test_fsdp2_refuses_each_setting_of_megatron_but_its_default(name: str, value: object) -> None:
    assert job(FSDP2 | {name: LearnerSpec.model_fields[name].default}).learner == job(FSDP2).learner
    with pytest.raises(ConfigError, match=rf"^learner\.{name}: is a setting of backend megatron: leave it out"):
        job(FSDP2 | {name: value})


def test_adapters_have_their_defaults() -> None:
    lora = job(FSDP2, ADAPTERS).model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules, lora.dropout) == (8, 16, None, 0.0)


@pytest.mark.parametrize(
    ("learner", "lora", "field"),
    [
        ({}, {}, "model.lora"),
        (FSDP2, {"rank": 0}, "model.lora.rank"),
        (FSDP2, {"alpha": 0}, "model.lora.alpha"),
        (FSDP2, {"target_modules": []}, "model.lora.target_modules"),
        (FSDP2, {"dropout": 1.0}, "model.lora.dropout"),
        (FSDP2, {"r": 8}, "model.lora.r"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused_by_name(
    learner: dict[str, Any], lora: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        job(learner, {"path": "tiny", "lora": lora})
    assert [problem.field for problem in refused.value.problems] == [field]
