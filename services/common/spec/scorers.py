"""Sections `reward.judges` and `reward.reward_models`: scorers that are models, by the names that the job gives them."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.common.spec.base import FieldError, Section
from services.common.spec.reference import is_reference
from services.common.spec.rollout import DType

PLACEHOLDERS = ("question", "response", "reference", "lowest", "highest")
"""Words in braces that a judge's template may have."""

_WORD_IN_BRACES = re.compile(r"(?<![A-Za-z])\{([a-z_]+)\}")
"""Not what follows a letter: `\\boxed{answer}` is LaTeX."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
"""Pattern of the names that a job or an operator gives."""
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


class AnswerFormat(StrEnum):
    """Form in which a judge states its score."""

    BRACKETS = "brackets"
    """`[[7]]`, anywhere in the answer; several must agree."""
    JSON = "json"
    """The whole answer is `{"score": 7}`, further keys allowed, with or without a fence around it."""


class JudgeSpec(Section):
    """One of `reward.judges`: a language model behind an endpoint that the operator has set up, and what it is to score."""

    endpoint: Name = Field(description="Name of an endpoint in MILLRACE_JUDGE_ENDPOINTS.", examples=["local-vllm"])
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="The model's name there (null: the endpoint's default)."
    )
    template: Annotated[str, StringConstraints(min_length=1, max_length=16_384)] | None = Field(
        default=None,
        description="Text of the request, with {question}, {response}, {reference}, {lowest} and {highest} in it (null: a template that "
        "asks for a score of correctness and helpfulness).",
    )
    answer: AnswerFormat = Field(
        default=AnswerFormat.BRACKETS,
        strict=False,
        description='Form of the score in the answer: brackets ([[7]]), or json ({"score": 7}).',
    )
    lowest: float = Field(default=1.0, ge=-1e6, le=1e6, description="Lowest score of the scale: reward 0.")
    highest: float = Field(default=10.0, ge=-1e6, le=1e6, description="Highest score of the scale: reward 1.")
    accuracy_from: float | None = Field(
        default=None,
        description="Score from which a response has accuracy 1, below it 0 (null: the accuracy is the reward).",
    )
    max_tokens: int = Field(default=1024, ge=1, le=32_768, description="Longest answer, tokens.")
    temperature: float | None = Field(
        default=0.0, ge=0.0, le=2.0, description="Sampling temperature of the judge (null: not sent, the server's)."
    )
    requests_at_once: int = Field(
        default=8, ge=1, le=1024, description="Requests of this job that one reward server has in flight at once."
    )
    timeout_s: float = Field(
        default=60.0,
        ge=0.5,
        le=600.0,
        description="Wall-clock limit of one verdict, repeated requests included; one request takes at most half of it.",
    )

    @field_validator("template")
    @classmethod
    def _known_placeholders(cls, template: str | None) -> str | None:
        if template is None:
            return None
        used = set(_WORD_IN_BRACES.findall(template))
        if unknown := sorted(used - set(PLACEHOLDERS)):
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"has {{{unknown[0]}}}, and knows {known}")
        if "response" not in used:
            raise ValueError("has no {response}: the judge would not see what it is to score")
        return template

    @model_validator(mode="after")
    def _scale_is_one(self) -> Self:
        if self.highest <= self.lowest:
            raise FieldError("highest", f"{self.highest:g} is not above lowest ({self.lowest:g})")
        if self.accuracy_from is not None and not self.lowest < self.accuracy_from <= self.highest:
            scale = f"above lowest ({self.lowest:g}) and at most highest ({self.highest:g})"
            raise FieldError("accuracy_from", f"{self.accuracy_from:g} is not {scale}")
        return self


class Transform(StrEnum):
    """What a reward model's scalar becomes."""

    NONE = "none"
    SIGMOID = "sigmoid"
    """1 / (1 + e^−x), which is within 0..1."""


class RewardModelSpec(Section):
    """One of `reward.reward_models`: a sequence classifier with one output, which the reward service runs in a process of its own."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="A registered model's name, or a Hugging Face directory (safetensors) under the allowed model roots, with a sequence "
        "classifier of one label.",
        examples=["tiny-reward", "/models/Skywork-Reward-V2-Qwen3-0.6B"],
    )
    dtype: DType = Field(
        default=DType.AUTO, strict=False, description="Weights' type (auto: float32 on CPUs, bfloat16 elsewhere)."
    )
    max_tokens: int = Field(
        default=4096, ge=16, le=131_072, description="Of a longer conversation the last tokens are scored."
    )
    batch_tokens: int = Field(
        default=16_384, ge=16, le=4_194_304, description="Most tokens of one forward pass, padding included."
    )
    transform: Transform = Field(
        default=Transform.NONE, strict=False, description="The reward: none (the model's scalar), or sigmoid of it."
    )
    accuracy_from: float | None = Field(
        default=None,
        ge=-1e6,
        le=1e6,
        description="Reward from which a response has accuracy 1, below it 0 (null: 0, after a sigmoid 0.5).",
    )
    timeout_s: float = Field(default=60.0, ge=0.5, le=600.0, description="Wall-clock limit of one batch.")
    load_timeout_s: float = Field(
        default=600.0, ge=1.0, le=7200.0, description="Wall-clock limit of loading the model."
    )

    @field_validator("path")
    @classmethod
    def _is_here(cls, path: str) -> str:
        if is_reference(path):
            raise ValueError("reward models are not fetched from hubs: name a registered model or a directory")
        return path

    @model_validator(mode="after")
    def _batch_holds_one(self) -> Self:
        if self.batch_tokens < self.max_tokens:
            raise FieldError("batch_tokens", f"{self.batch_tokens} is below max_tokens ({self.max_tokens})")
        return self

    @property
    def right_from(self) -> float:
        """Reward from which a response is right."""
        if self.accuracy_from is not None:
            return self.accuracy_from
        return 0.5 if self.transform is Transform.SIGMOID else 0.0
