"""Section `data`: sources of tasks, and their order."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.common.spec.base import FieldError, Section
from services.common.spec.reference import is_reference, parse_reference

PROCEDURAL_PREFIX = "reasoning_gym:"
ENVIRONMENT_PREFIX = "environment:"
FILE_SUFFIXES = (".parquet", ".jsonl")

ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class DataSourceSpec(Section):
    """One source of tasks: a file under the data root, a procedural `reasoning-gym` task, or an environment."""

    source: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="`reasoning_gym:<task>`, `environment:<name>`, the path of a .parquet or .jsonl file under the allowed data roots, or "
        "such a file of a hub's dataset: hf:ORG/NAME[@REVISION]/PATH, modelscope:ORG/NAME[@REVISION]/PATH. An accepted job names the "
        "commit.",
        examples=["reasoning_gym:chain_sum", "gsm8k/train.jsonl", "hf:openai/gsm8k/main/train-00000-of-00001.parquet"],
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the procedural task, as reasoning-gym names them, or of the environment.",
    )
    size: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Tasks to draw: procedural sources and environments make this many (default 10,000); files are cut to it.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of a procedural source or an environment. Give train and eval different ones.",
    )
    data_source: str | None = Field(
        default=None, max_length=256, description="Overrides the rows' `data_source`, by which the verifier is chosen."
    )
    prompt_key: ColumnName | None = Field(
        default=None, description="Column of the file that holds the prompt (null: `prompt`).", examples=["problem"]
    )
    answer_key: ColumnName | None = Field(
        default=None,
        description="Column of the file that holds the reference answer (null: `reward_model.ground_truth` or `ground_truth`).",
        examples=["solution"],
    )
    system_prompt: str | None = Field(
        default=None, max_length=65_536, description="A system message put before every prompt."
    )
    prompt_template: str | None = Field(
        default=None,
        max_length=65_536,
        description="Wraps the last user message; `{prompt}` stands for its text.",
        examples=["{prompt}\nAnswer:"],
    )

    @field_validator("source")
    @classmethod
    def _known_form(cls, value: str) -> str:
        if not value.startswith((PROCEDURAL_PREFIX, ENVIRONMENT_PREFIX)) and not value.endswith(FILE_SUFFIXES):
            suffixes = ", ".join(FILE_SUFFIXES)
            hint = (
                ""
                if value.startswith("reasoning")
                else "; `millrace data prepare` makes one of other files and folders"
            )
            made = f"`{PROCEDURAL_PREFIX}<task>`, `{ENVIRONMENT_PREFIX}<name>`"
            raise ValueError(f"must be {made} or end in one of {suffixes}, not {value!r}{hint}")
        if is_reference(value):
            parse_reference(value, file=True)
        return value

    @field_validator("prompt_template")
    @classmethod
    def _has_slot(cls, value: str | None) -> str | None:
        if value is not None and "{prompt}" not in value:
            raise ValueError("must contain `{prompt}`")
        return value

    @model_validator(mode="after")
    def _columns_of_files(self) -> Self:
        for name in ("prompt_key", "answer_key"):
            if getattr(self, name) is not None and not self.is_file:
                raise FieldError(name, f"is for files; {self.source} makes its tasks")
        if self.environment is not None and self.prompt_template is not None:
            raise FieldError("prompt_template", f"is for prompts; {self.source} says its own")
        return self

    @property
    def own_columns(self) -> dict[str, str]:
        """Of `prompt_key` and `answer_key` those that are set: name of the setting → column."""
        keys = {"prompt_key": self.prompt_key, "answer_key": self.answer_key}
        return {name: column for name, column in keys.items() if column is not None}

    @property
    def is_file(self) -> bool:
        """Whether its tasks are rows of a file."""
        return self.procedural_task is None and self.environment is None

    @property
    def environment(self) -> str | None:
        """The environment's name, or None."""
        return self.source.removeprefix(ENVIRONMENT_PREFIX) if self.source.startswith(ENVIRONMENT_PREFIX) else None

    @property
    def procedural_task(self) -> str | None:
        """The reasoning-gym task's name, or None for a file."""
        return self.source.removeprefix(PROCEDURAL_PREFIX) if self.source.startswith(PROCEDURAL_PREFIX) else None


class DataSpec(Section):
    """Section `data`."""

    train: DataSourceSpec = Field(description="Tasks to train on.")
    eval: DataSourceSpec | None = Field(default=None, description="Held-out tasks; needed when `eval` is enabled.")
    shuffle: bool = Field(
        default=True, description="Shuffle each epoch by the seed; the order is a pure function of seed and ordinal."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the order.")
    filter_overlong_prompts: bool = Field(
        default=False,
        description="Leave out tasks whose prompts leave no room for a response of full length; without it their groups fail.",
    )
