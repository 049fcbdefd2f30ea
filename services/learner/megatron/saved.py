"""Saved state: the files of all ranks of a checkpoint, read as one, whatever layout they were saved with.

rank = (stage × replicas + replica) × tensor-parallel size + tensor-parallel rank, Megatron's order;
replica = data-parallel rank × context-parallel size + context-parallel rank: all replicas hold the same weights, but for experts:
replicas 0, 1, … of expert-parallel size hold one after the other the experts of a layer, and the next as many hold them again.

A file numbers the layers of its stage, and its experts, from 0; here they have their numbers in the whole model.
"""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch

from services.common.errors import ConfigError
from services.learner.megatron.experts import expert_count, is_expert, shift_experts
from services.learner.training.rank_file import RankFile, rank_file

SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
LAYOUT = (*SIZES, "use_distributed_optimizer")
"""Keys of a file's layout that decide which part of the state it holds."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class SavedPlace(NamedTuple):
    """Where a parameter is saved."""

    stage: int
    replica: int
    """The first that holds it."""
    name: str
    """Of its tensor in these files."""


@dataclass(frozen=True, slots=True)
class SavedValues:
    """What an optimizer holds of one parameter."""

    parts: dict[str, list[torch.Tensor]]
    """By name (`exp_avg`, `master` …): values of the parameter's shape, the part of each tensor-parallel rank."""
    numbers: dict[str, torch.Tensor]
    """By name: what it holds once for the whole parameter, [] each."""
    counter: object
    """The step in the parameter's group; None if the optimizer does not count there."""


class SavedState:
    """The ranks' files of a checkpoint, opened when they are needed; a context, which closes them."""

    def __init__(self, folder: Path, pool: str = "") -> None:
        """Opens the first of the pool's. Raises ConfigError when it is missing or damaged."""
        self.folder, self._pool = folder, pool
        self._stack = ExitStack()
        first = RankFile(folder / rank_file(0, pool), self._stack)
        self._ranks = {0: first}
        self.about, self.layout = first.about, first.layout
        self.tp_size, self.pp_size, dp_size, cp_size, self.ep_size = (int(str(self.layout[size])) for size in SIZES)
        self.replicas = dp_size * cp_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rank(self, rank: int) -> RankFile:
        """One rank's file. Raises ConfigError when it is missing or damaged, or of another layout than the first."""
        if rank not in self._ranks:
            file = RankFile(self.folder / rank_file(rank, self._pool), self._stack)
            if file.layout != self.layout:
                first = self._ranks[0].path.name
                raise ConfigError(f"{file.path}: its layout is {file.layout}, and that of {first} {self.layout}")
            self._ranks[rank] = file
        return self._ranks[rank]

    def names(self, prefix: str) -> dict[str, SavedPlace]:
        """Global name in Megatron → its place, of the role with this prefix; empty if it has none."""
        begin = f"{prefix}model."
        found: dict[str, SavedPlace] = {}
        layers = 0
        for stage in range(self.pp_size):
            own = [name for name in self._rank(stage, 0).names if name.startswith(begin)]
            for replica in range(self.ep_size):
                experts = replica * expert_count(own)  # as many in each
                for name in (name for name in own if replica == 0 or is_expert(name)):
                    known = shift_experts(_shift_layers(name.removeprefix(begin), layers), experts)
                    found[known] = SavedPlace(stage, replica, name)
            layers += len({int(match[1]) for name in own if (match := _LAYER.search(name))})
        return found

    def weight(self, place: SavedPlace) -> list[torch.Tensor]:
        """A parameter: the part of each tensor-parallel rank."""
        return [self._rank(place.stage, tp, place.replica).tensor(place.name) for tp in range(self.tp_size)]

    def shape(self, place: SavedPlace) -> list[int]:
        """The shape of one of these parts."""
        return self._rank(place.stage, 0, place.replica).shape(place.name)

    def optimizer(self, place: SavedPlace) -> SavedValues:
        """What the optimizer holds of a parameter, put together over the replicas."""
        values = [self._optimizer(place, tp) for tp in range(self.tp_size)]
        parts = {state: [value.parts[state][0] for value in values] for state in values[0].parts}
        return SavedValues(parts, values[0].numbers, values[0].counter)

    def _optimizer(self, place: SavedPlace, tp: int) -> SavedValues:
        """What the ranks that hold one tensor-parallel part of it hold."""
        name, shape = place.name, self._rank(place.stage, tp, place.replica).shape(place.name)
        replicas = range(place.replica, self.replicas, self.ep_size) if is_expert(name) else range(self.replicas)
        pieces = {
            start: (end, key, rank)
            for rank in (self._rank(place.stage, tp, replica) for replica in replicas)
            for start, end, key in rank.places.get(name, [])
        }
        flat: dict[str, list[torch.Tensor]] = {}
        numbers: dict[str, torch.Tensor] = {}
        counter, reached = None, 0
        for start, (end, key, rank) in sorted(pieces.items()):
            if start != reached:
                break
            reached = end
            counter = rank.about["counters"][key]
            for state in rank.states.get(key, []):
                value = rank.tensor(f"{key}.{state}")
                if value.dim():
                    flat.setdefault(state, []).append(value.flatten())
                else:
                    numbers[state] = value
        if reached != math.prod(shape):
            raise ConfigError(
                f"{self.folder}: of {name} its files hold no state of the optimizer beyond value {reached}"
            )
        return SavedValues({state: [torch.cat(some).view(shape)] for state, some in flat.items()}, numbers, counter)

    def _rank(self, stage: int, tp: int, replica: int = 0) -> RankFile:
        return self.rank((stage * self.replicas + replica) * self.tp_size + tp)


def _shift_layers(name: str, layers: int) -> str:
    """The name with this many layers before those of its file."""
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + layers}.", name)
