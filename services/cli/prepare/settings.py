"""Settings of one preparation, with the keys of MindSpeed-RL's `configs/datasets/*.yaml` where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from services.common.errors import ConfigError
from services.common.spec.base import Section
from services.common.spec.job import problems_of

Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]

ROLES = ("prompt", "query", "response", "history", "system", "chosen", "rejected")
"""Parts of a row that `map_keys` may name."""
HINTS = {
    "enable_thinking": "prompts are messages, and the model's chat template sets it",
    "prompt_type_path": "put the text into the job's data.train.system_prompt and prompt_template",
    "pack": "the learner packs rows itself",
    "append_eod": "only prompts are kept",
    "json_keys": "the columns are always the standard ones",
    "streaming": "rows are always streamed",
    "overwrite_cache": "there is no cache; `overwrite` replaces the output",
    "cache_dir": "there is no cache",
}
"""Keys of MindSpeed-RL that have no meaning here, and why."""


class TokenizerType(StrEnum):
    """Kind of tokenizer."""

    HUGGING_FACE = "HuggingFaceTokenizer"


class ChatTemplate(StrEnum):
    """How a prompt's tokens are counted."""

    MODEL = "model"
    """With the chat template of the tokenizer's directory, as rollout servers do."""
    NONE = "none"
    """The messages' texts alone."""


class PrepareSettings(Section):
    """Settings of one preparation."""

    input: Text = Field(
        description="A .parquet, .jsonl, .json, .csv or .arrow file, a folder of them (read in the order of names), or one that "
        "`datasets` saved to disk."
    )
    output_prefix: Text = Field(
        description="Beginning of the output's paths: PREFIX_train.parquet, PREFIX_summary.json, …"
    )
    handler_name: Text = Field(
        description="What the rows are: a built-in handler's name or MindSpeed-RL's, or an installed one."
    )
    tokenizer_type: TokenizerType = Field(
        default=TokenizerType.HUGGING_FACE, strict=False, description="Kind of tokenizer."
    )
    tokenizer_name_or_path: Text | None = Field(
        default=None, description="Directory or hub id of the tokenizer; without it, lengths are counted in characters."
    )
    chat_template: ChatTemplate = Field(
        default=ChatTemplate.MODEL, strict=False, description="Whether prompts are counted with the model's template."
    )
    seq_length: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="Prompts of as many tokens or more are dropped (needs a tokenizer).",
    )
    prompt_type: Text = Field(default="empty", description="Instruction that is put around the prompts.")
    map_keys: dict[str, str] = Field(
        default_factory=dict,
        description="Columns of the rows by role (prompt, query, response, …); an empty name: none.",
    )
    dataset_additional_keys: list[Text] = Field(
        default_factory=list, max_length=64, description="Columns that are kept in `extra_info`, as text."
    )
    workers: int = Field(
        default=1, ge=1, le=256, description="Processes that read and count rows; the output is the same."
    )
    log_interval: int = Field(default=1000, ge=1, description="Rows between two lines of progress, without a terminal.")
    validation_share: float = Field(default=0.0, ge=0.0, lt=1.0, description="Share of the prompts that is held out.")
    seed: int = Field(default=1234, ge=0, lt=2**31, description="Seed of the split.")
    data_source: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Overrides the rows' `data_source`, by which the verifier is chosen."
    )
    default_ground_truth: Text | None = Field(
        default=None, description="Reference answer of rows that have none: for rewards that do not need one."
    )
    overwrite: bool = Field(default=False, description="Replace the output of an earlier run.")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:  # noqa: ANN401  as pydantic gives it
        if isinstance(values, dict):
            for key in values.keys() & HINTS.keys():
                raise ValueError(f"{key} is not supported: {HINTS[key]}")
            values = {key: value for key, value in values.items() if value is not None}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.seq_length is not None and self.tokenizer_name_or_path is None:
            raise ValueError("seq_length is counted in tokens: set tokenizer_name_or_path")
        if wrong := sorted(set(self.map_keys) - set(ROLES)):
            raise ValueError(f"map_keys: {wrong[0]!r} is no role; there are {', '.join(ROLES)}")
        return self

    @property
    def prefix(self) -> Path:
        """The output's paths begin with it."""
        return Path(self.output_prefix).absolute()


def read_settings(values: Mapping[str, Any]) -> PrepareSettings:
    """The settings of these values. Raises ConfigError, which names every wrong key."""
    try:
        return PrepareSettings.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(*problems_of(error, PrepareSettings)) from error
