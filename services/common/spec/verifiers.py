"""Settings of the built-in verifiers: of all rows in the job's `reward.config`, of one row in its extra_info, under the same names."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, field_validator

from services.common.spec.base import Section

Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][\w-]{0,63}$")]


class MultipleChoiceSettings(Section):
    """Of `multiple_choice`."""

    choices: JsonValue = Field(default=None, description="The options, where they are the same in every row.")


class ExactMatchSettings(Section):
    """Of `exact_match`."""

    exact_case: bool = Field(default=False, description="Whether upper and lower case differ.")


class FuzzyMatchSettings(Section):
    """Of `fuzzy_match`."""

    fuzzy_threshold: float = Field(default=0.9, gt=0.0, le=1.0, description="Similarity from which the accuracy is 1.")


class FormatSettings(Section):
    """Of `format`."""

    format_tags: tuple[Tag, ...] | None = Field(
        default=None, max_length=16, strict=False, description="Tags that follow each other (null: think, answer)."
    )
    format_pattern: str | None = Field(
        default=None, max_length=4096, description="Regular expression that the whole response matches."
    )
    format_boxed: bool = Field(default=False, description=r"Whether there must be a \boxed{…}.")

    @field_validator("format_pattern")
    @classmethod
    def _can_be_compiled(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return pattern

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags to look for."""
        if self.format_tags is not None:
            return self.format_tags
        return () if self.format_pattern is not None or self.format_boxed else ("think", "answer")


class CodeSettings(Section):
    """Of `code`."""

    code_score: Literal["all", "share"] = Field(
        default="all", description="Reward: 1 where all tests pass, or the share of tests that pass."
    )
    code_run_s: float = Field(default=2.0, gt=0.0, le=600.0, description="Limit of one test.")
    code_memory_mib: int = Field(default=512, ge=64, le=65_536, description="Memory of one test (address space).")
