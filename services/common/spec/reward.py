"""Section `reward`: which scorer judges which `data_source`, and its limits.

A scorer is a verifier (built in or installed), a rubric, a judge or a reward model: one name, whatever it is. What the sections say of each
other is checked here; which verifiers exist, only a server knows (services/common/config/verifiers.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from services.common.spec.base import FieldError, Section
from services.common.spec.scorers import NAME, JudgeSpec, RewardModelSpec

MAX_NAMED = 64
"""Most rubrics, most judges and most reward models of a job."""
MAX_FUNCTIONS = 16
"""Most functions of a rubric."""

Weight = Annotated[float, Field(gt=0.0, le=1000.0)]


class RubricSpec(Section):
    """Section `reward.rubrics.<name>`: a weighted sum of several scorers' rewards."""

    verifier_function: list[str] = Field(
        min_length=1, max_length=MAX_FUNCTIONS, description="Names of the scorers that are summed: of any kind."
    )
    verifier_weight: list[Weight] = Field(
        min_length=1, max_length=MAX_FUNCTIONS, description="The weight of each one's reward, in the same order."
    )
    accuracy_of: str | None = Field(
        default=None,
        description="The function whose accuracy is the rubric's (null: the mean of all, by their weights).",
    )

    @model_validator(mode="after")
    def _functions_agree(self) -> Self:
        functions, weights = len(self.verifier_function), len(self.verifier_weight)
        if functions != weights:
            raise FieldError("verifier_weight", f"{weights} weights for {functions} functions of verifier_function")
        for name in self.verifier_function:
            if self.verifier_function.count(name) > 1:
                raise FieldError("verifier_function", f"{name!r} stands there twice: add its weights")
        if self.accuracy_of is not None and self.accuracy_of not in self.verifier_function:
            raise FieldError("accuracy_of", f"{self.accuracy_of!r} is none of verifier_function")
        return self


class RewardSpec(Section):
    """Section `reward`: which scorer judges which `data_source`, and its limits."""

    verifiers: dict[str, str] = Field(
        default_factory=dict,
        description="data_source → name of a verifier, rubric, judge or reward model; overrides the built-in choice. "
        "`*` stands for every data_source.",
        examples=[{"openai/gsm8k": "gsm8k", "*": "math"}],
    )
    eval_verifiers: dict[str, str] = Field(
        default_factory=dict,
        description="The same for held-out tasks alone, where it comes before `verifiers`.",
        examples=[{"*": "gsm8k"}],
    )
    rubrics: dict[str, RubricSpec] = Field(
        default_factory=dict,
        max_length=MAX_NAMED,
        description="Name → weighted sum of several scorers.",
        examples=[
            {"answer_and_format": {"verifier_function": ["gsm8k", "format"], "verifier_weight": [1.0, 0.2]}},
        ],
    )
    judges: dict[str, JudgeSpec] = Field(
        default_factory=dict, max_length=MAX_NAMED, description="Name → language model that grades responses."
    )
    reward_models: dict[str, RewardModelSpec] = Field(
        default_factory=dict, max_length=MAX_NAMED, description="Name → model whose head scores responses."
    )
    config: dict[str, dict[str, JsonValue]] = Field(
        default_factory=dict,
        description="Verifier → its settings for all rows; a row's extra_info comes before them.",
        examples=[{"fuzzy_match": {"fuzzy_threshold": 0.9}}],
    )
    timeout_s: float = Field(default=5.0, ge=0.1, le=600.0, description="Wall-clock limit of one check.")
    memory_mib: int = Field(
        default=2048, ge=256, le=1_048_576, description="Memory limit of one check (address space)."
    )
    max_chars: int = Field(
        default=32_768,
        ge=1024,
        le=1_048_576,
        description="Of a longer response the end is judged, where the answer is.",
    )

    @property
    def named(self) -> Mapping[str, str]:
        """The names that the job defines itself, each with its section: {"my_rubric": "rubrics"}."""
        return {name: section for section, names in self._sections for name in names}

    @property
    def _sections(self) -> list[tuple[str, list[str]]]:
        return [("rubrics", [*self.rubrics]), ("judges", [*self.judges]), ("reward_models", [*self.reward_models])]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for section, names in self._sections:
            for name in names:
                if not re.fullmatch(NAME, name):
                    message = "a name has 1 to 63 letters, digits, `_`, `.` and `-`, and begins with a letter or digit"
                    raise FieldError(f"{section}[{name[:80]!r}]", message)
                if self.named[name] != section:
                    raise FieldError(f"{section}.{name}", f"reward.{self.named[name]} has that name, too")
        return self

    @model_validator(mode="after")
    def _rubrics_end(self) -> Self:
        graph = {name: set(rubric.verifier_function) & self.rubrics.keys() for name, rubric in self.rubrics.items()}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][::-1]
            message = f"a rubric cannot be a part of itself: {' → '.join(circle)}"
            raise FieldError(f"rubrics.{circle[0]}.verifier_function", message) from error
        return self
