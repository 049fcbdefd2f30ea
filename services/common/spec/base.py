"""What every section of the job spec has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the spec: frozen, and a key it does not know is an error that names the key."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
