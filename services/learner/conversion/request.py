"""Request of a conversion and its result, as JSON between the command and its process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class Direction(StrEnum):
    """What is made of what."""

    TO_HUGGING_FACE = "to-hf"
    TO_MEGATRON = "to-megatron"


class RoleName(StrEnum):
    """Models of a checkpoint that can be converted."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"

    @property
    def prefix(self) -> str:
        """Begin of its tensors' names in a checkpoint."""
        return "" if self is RoleName.ACTOR else f"{self.value}."


class TensorType(StrEnum):
    """Types of tensors that are written."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion.

    Example: Conversion("to-hf", "/home/jobs/demo-3f2a91c0/checkpoints/step-00000050", "/models/demo", home="/home", role="critic")
    """

    direction: Direction
    source: str
    """A checkpoint's directory, or a Hugging Face one."""
    out: str
    """Directory to be made; the process writes into an unfinished one beside it."""
    home: str
    """Where models that the checkpoint names are looked for."""
    model_roots: tuple[str, ...] = ()
    """And these."""
    role: RoleName = RoleName.ACTOR
    model: str | None = None
    """Hugging Face directory whose config and tokenizer go with the weights; None: the one that the checkpoint names."""
    dtype: TensorType | None = None
    """Of the tensors; None: the model's own."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def write(self, path: Path) -> None:
        """Writes it for the process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The conversion in a file of `write`."""
        given: dict[str, Any] = json.loads(path.read_text())
        given["direction"], given["role"] = Direction(given["direction"]), RoleName(given["role"])
        given["dtype"] = None if given["dtype"] is None else TensorType(given["dtype"])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote."""

    path: str
    role: str
    architecture: str
    dtype: str
    """Of its tensors; several are separated by commas."""
    tensors: int
    parameters: int
    bytes: int
    """Of all files."""
    step: int
    """Of the checkpoint that was read or made."""
