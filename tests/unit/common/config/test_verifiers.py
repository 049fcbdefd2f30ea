"""The choice of a verifier by the names that people give their datasets."""

from __future__ import annotations

import pytest

from services.common.config.verifiers import BuiltIn, available, built_in_choice, check_overrides, choose_verifier
from services.common.errors import ConfigError


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
    assert choose_verifier(data_source, {}) == name


@pytest.mark.parametrize(
    "data_source", ["", "my_own", "mathematics-olympiad", "gsm8k-hard-mode", "reasoning_gym", "x/aim"]
)
def test_a_dataset_that_nobody_knows_has_no_verifier(data_source: str) -> None:
    assert built_in_choice(data_source) is None
    with pytest.raises(ConfigError, match=r"data_source .*reward\.verifiers.*dapo_math.*gsm8k") as caught:
        choose_verifier(data_source, {})
    assert repr(data_source) in str(caught.value)


def test_an_exact_override_wins_over_the_wildcard_and_both_over_the_built_in_choice() -> None:
    overrides = {"openai/gsm8k": "math", "*": "dapo_math"}
    assert choose_verifier("openai/gsm8k", overrides) == "math"
    assert choose_verifier("gsm8k", overrides) == "dapo_math"
    assert choose_verifier("my_own", overrides) == "dapo_math"


def test_an_override_that_names_no_verifier_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"data_source 'x': there is no verifier 'os.system'; there are math, "):
        choose_verifier("x", {"x": "os.system"})
    with pytest.raises(ConfigError, match=r"reward.verifiers\['\*'\]: there is no verifier 'magic'"):
        check_overrides({"openai/gsm8k": "gsm8k", "*": "magic"})
    check_overrides({"openai/gsm8k": "gsm8k", "*": "math"})


def test_every_built_in_name_is_available() -> None:
    assert set(BuiltIn) <= set(available())
