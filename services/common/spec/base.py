"""What every section of the job spec has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the spec: frozen, and a key it does not know is an error that names the key.

    Types are strict: `true` and `"5"` are no numbers, `5.0` is no integer (`5` is a float). Fields of a StrEnum say strict=False, since
    their values come as text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, strict=True)
