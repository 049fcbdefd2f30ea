"""A critic's or a reference's model must take the actor's tokens and be spread over the actor's ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import ModelError, Problem
from services.common.models.directory import ModelInfo
from services.common.models.roles import check_role, named_models, naming
from services.common.spec.job import JobSpec

ACTOR = ModelInfo("Qwen2ForCausalLM", 24, 14, 2, 896, 4864, 151_936, 32_768, tie_word_embeddings=True)
LARGER = replace(ACTOR, num_layers=28, num_attention_heads=12, hidden_size=1536, intermediate_size=8960)


def spec(**sections: Any) -> JobSpec:
    document = {"model": {"path": "a"}, "data": {"train": {"source": "tasks.jsonl"}}, "algorithm": {"preset": "ppo"}}
    return JobSpec.model_validate(document | {"critic": {}, "reference": {}} | sections)


def problems(role: str, info: ModelInfo, asked: JobSpec, actor: ModelInfo | None = ACTOR) -> list[tuple[str, str]]:
    with pytest.raises(ModelError) as caught:
        check_role(role, info, actor, asked)
    return [(problem.field, problem.message) for problem in caught.value.problems]


def test_only_a_role_with_a_path_has_a_model_of_its_own() -> None:
    assert named_models(spec()) == {}
    assert named_models(spec(critic={"path": "b"})) == {"critic": "b"}
    assert named_models(spec(critic={"path": "b"}, reference={"path": "c"})) == {"critic": "b", "reference": "c"}
    assert named_models(spec(algorithm={}, critic=None, reference=None)) == {}


def test_a_larger_model_of_the_same_family_fits() -> None:
    check_role("critic", LARGER, ACTOR, spec(learner={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}))


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_another_vocabulary_is_refused_with_both_fields(role: str) -> None:
    [(field, message)] = problems(role, replace(LARGER, vocab_size=152_064), spec())
    assert field == f"{role}.path"
    assert message == "has 152064 vocabulary entries and model.path 151936: both must take the same tokens"


def test_too_few_positions_are_refused_unless_the_job_is_shorter() -> None:
    short = replace(ACTOR, max_position_embeddings=4096)
    [(field, message)] = problems("reference", short, spec())
    assert field == "reference.path"
    assert message == "has 4096 positions and model.path 32768: set model.max_model_len to 4096 at most"
    [(_, message)] = problems("reference", short, spec(model={"path": "a", "max_model_len": 8192}))
    assert message == "has 4096 positions and model.max_model_len 8192: set model.max_model_len to 4096 at most"
    check_role("reference", short, ACTOR, spec(model={"path": "a", "max_model_len": 4096}))


def test_sizes_that_the_ranks_do_not_divide_name_the_roles_path() -> None:
    odd = replace(ACTOR, num_layers=23)
    [(field, message)] = problems("critic", odd, spec(learner={"pipeline_parallel_size": 2}))
    assert (field, message) == ("learner.pipeline_parallel_size", "2 does not divide critic.path's 23 layers")


def test_without_the_actors_shape_only_the_split_is_judged() -> None:
    check_role("critic", replace(ACTOR, vocab_size=7), None, spec())


def test_a_problem_of_the_model_becomes_one_of_the_role_and_others_stay() -> None:
    with pytest.raises(ModelError) as caught, naming("critic.path"):
        raise ModelError(Problem("model.path", "is not a directory"), Problem("learner.tensor_parallel_size", "3"))
    assert [problem.field for problem in caught.value.problems] == ["critic.path", "learner.tensor_parallel_size"]
