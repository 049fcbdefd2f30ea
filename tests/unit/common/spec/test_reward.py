"""Section `reward`: what its parts say of each other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.spec.job import problems_of
from services.common.spec.reward import MAX_FUNCTIONS, MAX_NAMED, RewardSpec


def problems(**reward: Any) -> dict[str, str]:
    """Field → message of a section that is refused."""
    with pytest.raises(ValidationError) as caught:
        RewardSpec.model_validate(reward)
    return {problem.field: problem.message for problem in problems_of(caught.value, RewardSpec)}


def rubric(*functions: str, weights: list[float] | None = None, **more: Any) -> dict[str, Any]:
    return {"verifier_function": [*functions], "verifier_weight": weights or [1.0] * len(functions), **more}


def test_a_section_of_an_older_release_means_what_it_meant() -> None:
    old = {"verifiers": {"*": "math"}, "timeout_s": 5.0, "memory_mib": 2048, "max_chars": 32768}
    spec = RewardSpec.model_validate(old)
    assert (spec.verifiers, spec.eval_verifiers, dict(spec.named), spec.config) == ({"*": "math"}, {}, {}, {})


def test_every_function_has_a_weight() -> None:
    found = problems(rubrics={"r": rubric("math", "format", weights=[1.0])})
    assert found == {"rubrics.r.verifier_weight": "1 weights for 2 functions of verifier_function"}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1001.0])
def test_a_weight_that_adds_nothing_or_subtracts_is_refused(weight: float) -> None:
    assert list(problems(rubrics={"r": rubric("math", weights=[weight])})) == ["rubrics.r.verifier_weight.0"]


def test_a_function_stands_once_in_a_rubric() -> None:
    assert "'math' stands there twice" in problems(rubrics={"r": rubric("math", "math")})["rubrics.r.verifier_function"]


def test_the_accuracy_is_that_of_a_function() -> None:
    found = problems(rubrics={"r": rubric("math", accuracy_of="format")})
    assert found == {"rubrics.r.accuracy_of": "'format' is none of verifier_function"}


@pytest.mark.parametrize("parts", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}])
def test_a_rubric_is_no_part_of_itself(parts: dict[str, str]) -> None:
    [(field, message)] = problems(rubrics={name: rubric("math", part) for name, part in parts.items()}).items()
    assert field.startswith("rubrics.")
    assert message.startswith("a rubric cannot be a part of itself: ")
    first, *_, last = message.partition(": ")[2].split(" → ")
    assert first == last
    assert first in parts


def test_a_name_stands_in_one_section() -> None:
    assert problems(rubrics={"x": rubric("math")}, judges={"x": {"endpoint": "local"}}) == {
        "rubrics.x": "reward.judges has that name, too"
    }


@pytest.mark.parametrize("name", ["", "a b", "-a", "x" * 64, "ü", "a/b", "*"])
def test_a_name_is_a_plain_word(name: str) -> None:
    [(field, message)] = problems(rubrics={name: rubric("math")}).items()
    assert field == f"rubrics[{name!r}]"
    assert message.startswith("a name has 1 to 63 letters")


def test_a_reward_model_of_a_hub_is_refused() -> None:
    [(field, message)] = problems(reward_models={"x": {"path": "hf:org/scorer"}}).items()
    assert field == "reward_models.x.path"
    assert "reward models are not fetched from hubs" in message


def test_their_number_is_bounded() -> None:
    assert list(problems(rubrics={f"r{i}": rubric("math") for i in range(MAX_NAMED + 1)})) == ["rubrics"]
    names = [f"v{i}" for i in range(MAX_FUNCTIONS + 1)]
    assert list(problems(rubrics={"r": rubric(*names)})) == ["rubrics.r.verifier_function", "rubrics.r.verifier_weight"]
