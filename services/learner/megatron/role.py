"""Role of a rank in its state: a model, its optimizer if it is trained, and the names of both in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.learner.megatron.model import ModelPart
from services.learner.megatron.optimizer import Optimizer, Place


@dataclass(frozen=True, slots=True)
class Role:
    """A model of this rank, and its optimizer if it is trained."""

    name: str
    """Prefix of its tensors; empty for the actor, whose names are those of all releases."""
    part: ModelPart
    optimizer: Optimizer | None

    @property
    def prefix(self) -> str:
        """Begin of its tensors' names."""
        return f"{self.name}." if self.name else ""

    @property
    def chunk(self) -> torch.nn.Module:
        """The bare model of this pipeline stage."""
        return self.part.chunk  # type: ignore[no-any-return]

    def groups(self) -> list[tuple[str, torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
        """Every parameter that its optimizer updates: a key that is stable over restarts, optimizer, group, parameter."""
        return [
            (self._key(o, g, p), part, group, parameter)
            for o, part in enumerate(self.optimizer.parts if self.optimizer is not None else [])
            for g, group in enumerate(part.param_groups)
            for p, parameter in enumerate(group["params"])
        ]

    def places(self) -> dict[str, Place]:
        """By the keys of `groups`, what of which parameter of the model each updates."""
        places = self.optimizer.places() if self.optimizer is not None else {}
        return {self._key(*indexes): place for indexes, place in places.items()}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Its parameters, by the names of this stage."""
        return dict(self.chunk.named_parameters())

    def model(self) -> dict[str, torch.Tensor]:
        """The same, by their names in a checkpoint."""
        return {f"{self.prefix}model.{name}": parameter for name, parameter in self.parameters().items()}

    def described_places(self) -> dict[str, tuple[str, int, int]]:
        """The places as in a file: the model's tensor there, start and end of its values."""
        names = {id(parameter): name for name, parameter in self.model().items()}
        return {key: (names[id(place.parameter)], place.start, place.end) for key, place in self.places().items()}

    def _key(self, optimizer: int, group: int, parameter: int) -> str:
        return f"{self.prefix}optimizer.{optimizer}.{group}.{parameter}"
