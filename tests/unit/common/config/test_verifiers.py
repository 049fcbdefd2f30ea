"""The choice of a verifier by the names that people give their datasets."""

from __future__ import annotations

import pytest

from services.common.config.verifiers import BuiltIn, available, built_in_choice, check_reward, choose_verifier
from services.common.errors import ConfigError
from services.common.spec.reward import RewardSpec, RubricSpec
from services.common.spec.scorers import JudgeSpec


def rubric(*functions: str) -> RubricSpec:
    return RubricSpec(verifier_function=list(functions), verifier_weight=[1.0] * len(functions))


@pytest.mark.parametrize(
    ("data_source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("math_dapo", "dapo_math"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "dapo_math"),
        ("aime", "dapo_math"),
        ("aime2024", "dapo_math"),
        ("HuggingFaceH4/aime_2024", "dapo_math"),
        ("Maxwell-Jia/AIME_2024", "dapo_math"),
        ("math", "math"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("hendrycks/competition_math", "math"),
        ("reasoning_gym:chain_sum", "reasoning_gym"),
    ],
)
def test_datasets_have_the_verifier_that_people_expect(data_source: str, name: str) -> None:
    assert built_in_choice(data_source) == name
    assert choose_verifier(data_source, RewardSpec()) == name


@pytest.mark.parametrize(
    "data_source", ["", "my_own", "mathematics-olympiad", "gsm8k-hard-mode", "reasoning_gym", "x/aim"]
)
def test_a_dataset_that_nobody_knows_has_no_verifier(data_source: str) -> None:
    assert built_in_choice(data_source) is None
    with pytest.raises(ConfigError, match=r"data_source .*reward\.verifiers.*dapo_math.*gsm8k") as caught:
        choose_verifier(data_source, RewardSpec())
    assert repr(data_source) in str(caught.value)


def test_an_exact_override_wins_over_the_wildcard_and_both_over_the_built_in_choice() -> None:
    reward = RewardSpec(verifiers={"openai/gsm8k": "math", "*": "dapo_math"})
    assert choose_verifier("openai/gsm8k", reward) == "math"
    assert choose_verifier("gsm8k", reward) == "dapo_math"
    assert choose_verifier("my_own", reward) == "dapo_math"


@pytest.mark.parametrize(
    ("verifiers", "eval_verifiers", "train", "held_out"),
    [
        ({"*": "math"}, {}, "math", "math"),
        ({"*": "math"}, {"*": "gsm8k"}, "math", "gsm8k"),
        ({"openai/gsm8k": "math"}, {"*": "dapo_math"}, "math", "dapo_math"),
        ({}, {"openai/gsm8k": "math"}, "gsm8k", "math"),
        ({"*": "math"}, {"another": "gsm8k"}, "math", "math"),
    ],
)
def test_held_out_tasks_may_have_another_verifier(
    verifiers: dict[str, str], eval_verifiers: dict[str, str], train: str, held_out: str
) -> None:
    reward = RewardSpec(verifiers=verifiers, eval_verifiers=eval_verifiers)
    assert choose_verifier("openai/gsm8k", reward) == train
    assert choose_verifier("openai/gsm8k", reward, held_out=True) == held_out


def test_a_name_that_no_verifier_has_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"data_source 'x': there is no verifier 'os.system'; there are math, "):
        choose_verifier("x", RewardSpec(verifiers={"x": "os.system"}))


def test_what_a_job_defines_may_be_named_like_a_verifier() -> None:
    reward = RewardSpec(
        verifiers={"*": "both"}, rubrics={"both": rubric("math", "gsm8k")}, config={"format": {"format_tags": ["plan"]}}
    )
    check_reward(reward)
    assert choose_verifier("x", reward) == "both"


@pytest.mark.parametrize(
    ("reward", "field"),
    [
        (RewardSpec(verifiers={"a": "gsm8k", "*": "magic"}), "reward.verifiers['*']"),
        (RewardSpec(eval_verifiers={"a": "magic"}), "reward.eval_verifiers['a']"),
        (RewardSpec(rubrics={"r": rubric("math", "magic")}), "reward.rubrics.r.verifier_function"),
        (RewardSpec(config={"magic": {}}), "reward.config.magic"),
        (RewardSpec(config={"math": {"anything": 1}}), "reward.config.math"),
        (RewardSpec(config={"fuzzy_match": {"fuzzy_threshold": 2}}), "reward.config.fuzzy_match.fuzzy_threshold"),
        (RewardSpec(config={"format": {"format_pattern": "("}}), "reward.config.format.format_pattern"),
        (RewardSpec(config={"format": {"format_tags": ["a b"]}}), "reward.config.format.format_tags.0"),
        (RewardSpec(config={"code": {"code_scores": "share"}}), "reward.config.code.code_scores"),
        (RewardSpec(rubrics={"math": rubric("gsm8k")}), "reward.rubrics.math"),
        (RewardSpec(judges={"gsm8k": JudgeSpec(endpoint="local")}), "reward.judges.gsm8k"),
        (RewardSpec(verifiers={"*": "code"}), "reward.verifiers['*']"),
        (RewardSpec(rubrics={"r": rubric("code")}), "reward.rubrics.r.verifier_function"),
    ],
)
def test_a_wrong_name_is_an_error_of_its_field(reward: RewardSpec, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_reward(reward)
    assert [problem.field for problem in caught.value.problems] == [field]


def test_code_may_be_named_where_the_operator_lets_it_run() -> None:
    check_reward(RewardSpec(verifiers={"*": "code"}), code=True)


def test_every_built_in_name_is_available() -> None:
    assert set(BuiltIn) <= set(available())
