"""Job spec: all sections together, and the only place where YAML or JSON is parsed into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from services.common.errors import ConfigError, Problem
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.base import RECORDED, FieldError, Section
from services.common.spec.choices import AdvantageEstimator
from services.common.spec.data import DataSpec
from services.common.spec.document import dump_document, parse_document, parse_recorded
from services.common.spec.environment import EnvironmentSpec
from services.common.spec.learner import (
    BackendName,
    CheckpointSpec,
    CriticSpec,
    EvalSpec,
    LearnerSpec,
    OffPolicySpec,
    Placement,
    ReferenceSpec,
)
from services.common.spec.placement import PlacementSpec, RolloutPlacement
from services.common.spec.presets import DIVIDE_BY_LONGEST
from services.common.spec.reference import Reference, is_reference, parse_reference
from services.common.spec.reward import RewardSpec
from services.common.spec.rollout import ModelSpec, RolloutSpec
from services.common.spec.trackers import TrackersSpec
from services.common.spec.unknown_keys import explain

_UNION_BRANCHES = ("str-enum[", "constrained-str")
"""Parts that pydantic adds to a field's path: which type of a union a value was tried as."""
Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/=+-]{0,63}$")]
Tags = Annotated[list[Tag], Field(max_length=32, examples=[["ablation", "sweep:lr-3f2a"]])]
Notes = Annotated[str, StringConstraints(max_length=4096)]
SCHEMA_ID = "urn:millrace:job-spec"

MAX_EXPLAINED = 100
"""Problems of one document among which unknown keys are explained: a hostile body has any number of them."""


class JobSpec(Section):
    """What one job trains, on what, and how. Only `model` and `data` have no default."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = Field(
        default="job", description="A short name; the job's id starts with it."
    )
    tags: Tags = Field(default_factory=list, description="Labels, by which jobs are found; they can be changed later.")
    notes: Notes = Field(default="", description="A remark for people; it can be changed later.")
    model: ModelSpec
    data: DataSpec
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    environment: EnvironmentSpec | None = Field(
        default=None, description="Limits of episodes, where a source of data is an environment; null: there is none."
    )
    reward: RewardSpec = Field(default_factory=RewardSpec)
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    learner: LearnerSpec = Field(default_factory=LearnerSpec)
    critic: CriticSpec | None = Field(default=None, description="Value model of advantage_estimator gae; null: none.")
    reference: ReferenceSpec | None = Field(
        default=None, description="Frozen policy that the KL is measured to; null: none."
    )
    off_policy: OffPolicySpec = Field(default_factory=OffPolicySpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    eval: EvalSpec = Field(default_factory=EvalSpec)
    placement: PlacementSpec = Field(default_factory=PlacementSpec)
    trackers: TrackersSpec = Field(default_factory=TrackersSpec)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:  # noqa: ANN401  any body of a request
        """Fills in `algorithm.constant_length` of presets that divide by the longest response."""
        if not isinstance(given, Mapping) or not isinstance(algorithm := given.get("algorithm"), Mapping):
            return given
        if algorithm.get("preset") not in tuple(DIVIDE_BY_LONGEST) or algorithm.get("token_level_loss"):
            return given
        rollout = given.get("rollout")
        longest = rollout.get("rollout_max_tokens") if isinstance(rollout, Mapping) else None
        length = RolloutSpec.model_fields["rollout_max_tokens"].default if longest is None else longest
        return dict(given) | {"algorithm": {"constant_length": length} | dict(algorithm)}

    @model_validator(mode="after")
    def _roles_agree(self) -> Self:
        estimator, critic, algorithm = self.algorithm.advantage_estimator, self.critic, self.algorithm
        if estimator == AdvantageEstimator.GAE and critic is None:
            message = "gae needs the values of a critic: add a section critic (`critic: {}`)"
            raise FieldError("algorithm.advantage_estimator", message)
        if critic is not None and isinstance(estimator, AdvantageEstimator) and estimator is not AdvantageEstimator.GAE:
            message = f"has no use for algorithm.advantage_estimator {estimator}: leave it out, or set gae"
            raise FieldError("critic", message)
        if algorithm.wants_reference and self.reference is None:
            message = f"{algorithm.kl_coefficient:g} needs a reference: add a section reference (`reference: {{}}`), or set it to 0"
            raise FieldError("algorithm.kl_coefficient", message)
        if critic is not None and critic.warmup_steps >= self.learner.steps:
            message = f"{critic.warmup_steps} leaves no step of learner.steps ({self.learner.steps}) to the actor"
            raise FieldError("critic.warmup_steps", message)
        return self

    @model_validator(mode="after")
    def _backend_has_adapters(self) -> Self:
        if self.model.lora is not None and self.learner.backend is not BackendName.FSDP2:
            raise FieldError(
                "model.lora", "adapters are trained by backend fsdp2: set learner.backend to fsdp2, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _group_sizes_agree(self) -> Self:
        algorithm, fewest = self.algorithm, self.rollout.fewest_rollouts
        field = "rollout.group_size" if self.rollout.min_group_size is None else "rollout.min_group_size"
        least = f"{fewest} must be at least 2 for algorithm"
        if fewest < 2 and algorithm.compares_group:
            raise FieldError(field, f"{least}.advantage_estimator {algorithm.advantage_estimator}")
        if fewest < 2 and algorithm.filter_groups_enable:
            raise FieldError(field, f"{least}.filter_groups_enable: a group of one never differs")
        size, groups = self.learner.mini_batch_size, algorithm.groups_per_step
        if size is not None and groups % size:
            message = f"{size} does not divide algorithm.filter_groups_train_batch_size ({groups})"
            raise FieldError("learner.mini_batch_size", message)
        return self

    @model_validator(mode="after")
    def _episodes_have_limits(self) -> Self:
        sources = {"data.train": self.data.train, "data.eval": self.data.eval}
        played = [name for name, source in sources.items() if source is not None and source.environment is not None]
        if self.environment is None:
            if played:
                message = "is an environment: add a section environment (`environment: {}`)"
                raise FieldError(f"{played[0]}.source", message)
            return self
        if not played and not any(source.is_file for source in sources.values() if source is not None):
            raise FieldError("environment", "no source of data is an environment, or a file: leave it out")
        longest, all_tokens = self.environment.max_turn_tokens, self.rollout.rollout_max_tokens
        if longest > all_tokens:
            raise FieldError(
                "environment.max_turn_tokens", f"{longest} is more than rollout.rollout_max_tokens, {all_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.eval.enabled and self.data.eval is None:
            raise FieldError("eval.enabled", "needs held-out tasks: set data.eval")
        buffer, limit = self.algorithm.overlong_buffer, self.model.max_model_len
        response = f"rollout.rollout_max_tokens ({self.rollout.rollout_max_tokens})"
        if self.algorithm.overlong_buffer_enable and buffer > self.rollout.rollout_max_tokens:
            raise FieldError("algorithm.overlong_buffer", f"{buffer} is longer than {response}")
        if limit is not None and limit <= self.rollout.rollout_max_tokens:
            raise FieldError("model.max_model_len", f"{limit} leaves no room for a prompt beside {response}")
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether engine and learner share devices."""
        return self.placement.rollout is RolloutPlacement.COLOCATED

    @property
    def pools(self) -> list[list[str]]:
        """Roles that share ranks; the actor's, whose name is empty, first."""
        roles = {"critic": self.critic, "reference": self.reference}
        placed = {role: section.placement for role, section in roles.items() if section is not None}
        with_actor = [role for role, placement in placed.items() if placement is Placement.ACTOR]
        return [["", *with_actor], *([role] for role in placed if role not in with_actor)]

    @property
    def world_size(self) -> int:
        """Ranks of the job, in all pools."""
        return self.learner.world_size * len(self.pools)

    @property
    def references(self) -> dict[str, Reference]:
        """What the job names of hubs, by field."""
        models = {"model.path": self.model, "critic.path": self.critic, "reference.path": self.reference}
        named = {field: section.path for field, section in models.items() if section is not None}
        found = {
            field: parse_reference(path, file=False) for field, path in named.items() if path and is_reference(path)
        }
        for section, part in (("train", self.data.train), ("eval", self.data.eval)):
            if part is not None and is_reference(part.source):
                found[f"data.{section}.source"] = parse_reference(part.source, file=True)
        return found

    def with_references(self, references: Mapping[str, Reference]) -> Self:
        """The spec with other references in these fields of `references`."""
        document = self.model_dump(mode="json")
        for field, reference in references.items():
            *sections, name = field.split(".")
            part = document
            for section in sections:
                part = part[section]
            part[name] = str(reference)
        return type(self).model_validate(document, context=RECORDED)

    @property
    def ranks_estimate(self) -> bool:
        """Whether advantages need what models compute, values or a KL: then the ranks estimate them, else the head, from rewards."""
        return self.critic is not None or self.algorithm.kl_in_reward

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of the actor on a full batch."""
        groups = self.algorithm.groups_per_step
        return self.learner.ppo_epochs * (groups // (self.learner.mini_batch_size or groups))

    @property
    def slots(self) -> int:
        """The active-group budget: (max_off_policy_steps + 1) × groups_per_step."""
        return (self.off_policy.max_off_policy_steps + 1) * self.algorithm.groups_per_step


def parse_spec(text: str | bytes) -> JobSpec:
    """The spec in the YAML (1.2) or JSON text of a new job. Raises ConfigError, with a line for each wrong field."""
    return _parse(parse_document, text)


def parse_recorded_spec(text: str | bytes) -> JobSpec:
    """The spec of an existing job, from the output of `dump_spec` of this release or an older one.

    A setting that it does not name has the meaning of that release. Raises ConfigError when it is not understood here.
    """
    return _parse(parse_recorded, text, RECORDED)


def _parse(parse: Callable[[str | bytes], object], text: str | bytes, context: str | None = None) -> JobSpec:
    try:
        document = parse(text)
    except ConfigError as error:
        raise ConfigError(f"the job spec {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"the job spec must be a mapping with `model` and `data`, not {type(document).__name__}")
    try:
        return JobSpec.model_validate(document, context=context)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, JobSpec)) from error


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """One problem per wrong field of a `model`, below `prefix`: `learner.lr: Input should be greater than 0 (got -1)`."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"] if not str(part).startswith(_UNION_BRANCHES))
        if isinstance(cause := item.get("ctx", {}).get("error"), FieldError):
            path, message = f"{path}.{cause.field}".removeprefix("."), cause.message
        elif item["type"] == "extra_forbidden":
            message = explain(model, path.split(".")) if len(problems) < MAX_EXPLAINED else "is not a setting"
        else:
            got = "" if item["type"] in {"missing", "value_error"} else f" (got {str(item['input'])[:80]!r})"
            message = f"{item['msg']}{got}"
        problems.append(Problem(f"{prefix}{path or 'spec'}", message))
    return problems


def spec_schema() -> dict[str, Any]:
    """The JSON schema of a new job's spec, for editors and other programs."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return head | JobSpec.model_json_schema()


def dump_spec(spec: JobSpec) -> str:
    """The resolved spec as YAML, every default written out."""
    return dump_document(spec.model_dump(mode="json"))
