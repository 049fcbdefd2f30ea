"""The whole job spec, and the one place where YAML and JSON become it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from services.common.errors import ConfigError, Problem
from services.common.spec.algorithm import RECORDED, AlgorithmSpec
from services.common.spec.base import Section
from services.common.spec.data import DataSpec
from services.common.spec.document import dump_document, parse_document, parse_recorded
from services.common.spec.learner import CheckpointSpec, EvalSpec, LearnerSpec, OffPolicySpec
from services.common.spec.rollout import ModelSpec, RewardSpec, RolloutSpec


class JobSpec(Section):
    """What one job trains, on what, and how. Only `model` and `data` have no default."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = Field(
        default="job", description="A short name; the job's id starts with it."
    )
    model: ModelSpec
    data: DataSpec
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    reward: RewardSpec = Field(default_factory=RewardSpec)
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    learner: LearnerSpec = Field(default_factory=LearnerSpec)
    off_policy: OffPolicySpec = Field(default_factory=OffPolicySpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    eval: EvalSpec = Field(default_factory=EvalSpec)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.eval.enabled and self.data.eval is None:
            raise ValueError("eval.enabled needs held-out tasks: set data.eval")
        length = self.rollout.rollout_max_tokens
        if self.algorithm.overlong_buffer_enable and self.algorithm.overlong_buffer > length:
            raise ValueError(
                f"algorithm.overlong_buffer ({self.algorithm.overlong_buffer}) is longer than rollout.rollout_max_tokens ({length})"
            )
        if self.model.max_model_len is not None and self.model.max_model_len <= length:
            raise ValueError(
                f"model.max_model_len ({self.model.max_model_len}) leaves no room for a prompt beside rollout_max_tokens ({length})"
            )
        return self

    @property
    def slots(self) -> int:
        """The active-group budget: (max_off_policy_steps + 1) × groups_per_step."""
        return (self.off_policy.max_off_policy_steps + 1) * self.algorithm.groups_per_step


def parse_spec(text: str | bytes) -> JobSpec:
    """A spec from the YAML (1.2) or JSON text that a person wrote for a new job.

    Raises:
        ConfigError: not YAML, or not a valid spec; one line per wrong field.
    """
    return _validated(_mapping(parse_document, text))


def parse_recorded_spec(text: str | bytes) -> JobSpec:
    """The spec of a job that there is, from what `dump_spec` of this release or an older one wrote.

    A setting that it does not name has the meaning that it had then.

    Raises:
        ConfigError: it is not one that this release understands.
    """
    return _validated(_mapping(parse_recorded, text), RECORDED)


def _mapping(parse: Callable[[str | bytes], object], text: str | bytes) -> dict[str, Any]:
    try:
        document = parse(text)
    except ConfigError as error:
        raise ConfigError(f"the job spec {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"the job spec must be a mapping with `model` and `data`, not {type(document).__name__}")
    return document


def _validated(document: dict[str, Any], context: str | None = None) -> JobSpec:
    try:
        return JobSpec.model_validate(document, context=context)
    except ValidationError as error:
        raise ConfigError(*problems_of(error)) from error


def problems_of(error: ValidationError, prefix: str = "") -> list[Problem]:
    """One problem per wrong field, below `prefix`: `learner.lr: Input should be greater than 0 (got -1)`."""
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in item["loc"]) or "spec"
        got = "" if item["type"] in {"missing", "value_error"} else f" (got {str(item['input'])[:80]!r})"
        problems.append(Problem(f"{prefix}{path}", f"{item['msg']}{got}"))
    return problems


def dump_spec(spec: JobSpec) -> str:
    """The resolved spec as YAML, every default written out."""
    return dump_document(spec.model_dump(mode="json"))
