"""Base class of the sections of the job spec."""

from pydantic import BaseModel, ConfigDict

RECORDED = "recorded"
"""Validation context of a spec that was resolved and saved before, perhaps by an earlier release."""


class Section(BaseModel):
    """A section of the spec: frozen; an unknown key is an error that names it.

    Types are strict: `true` and `"5"` are not numbers, `5.0` is not an integer (`5` is a float). Fields of a StrEnum set strict=False,
    since their values are given as text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, strict=True)


class FieldError(ValueError):
    """What a validator of the whole spec finds wrong with one field."""

    def __init__(self, field: str, message: str) -> None:
        """`field`: dotted path below the validated section; `message`: what is wrong, with the other field's name."""
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message
