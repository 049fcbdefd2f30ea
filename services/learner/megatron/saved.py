"""Saved state: the files of all ranks of a checkpoint, read as one, whatever layout they were saved with.

rank = (stage × replicas + replica) × tensor-parallel size + tensor-parallel rank, Megatron's order;
replica = data-parallel rank × context-parallel size + context-parallel rank: all replicas hold the same weights.

A file numbers the layers of its stage from 0; here they have their numbers in the whole model.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import ConfigError

FORMAT = 2
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "context_parallel_size")
LAYOUT = (*SIZES, "use_distributed_optimizer")
"""Keys of a file's layout that decide which part of the state it holds."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def rank_file(rank: int) -> str:
    """Name of a rank's file in a checkpoint's directory."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class SavedValues:
    """What an optimizer holds of one parameter."""

    parts: dict[str, list[torch.Tensor]]
    """By name (`exp_avg`, `master` …): values of the parameter's shape, the part of each tensor-parallel rank."""
    numbers: dict[str, torch.Tensor]
    """By name: what it holds once for the whole parameter, [] each."""
    counter: object
    """The step in the parameter's group; None if the optimizer does not count there."""


class RankFile:
    """The file of one rank, whose tensors are read one by one."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        """Opens it until the stack is closed. Raises ConfigError when it is missing, damaged, or of an unknown format."""
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
        try:
            self._file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self.about: dict[str, Any] = json.loads((self._file.metadata() or {})["about"])
            found = self.about["format"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not the file of a rank: {error}") from error
        if found != FORMAT:
            raise ConfigError(f"{path}: format {found} is not known (this is format {FORMAT})")
        self.names = frozenset(self._file.keys())

    @property
    def layout(self) -> dict[str, object]:
        """The layout and the dtype that it was saved with."""
        # files of a release without context parallelism do not name its size
        known: dict[str, object] = {"context_parallel_size": 1}
        return known | self.about["layout"]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor. Raises ConfigError when it is missing."""
        if name not in self.names:
            raise ConfigError(f"{self.path}: tensor {name} is missing")
        found: torch.Tensor = self._file.get_tensor(name)
        return found

    def shape(self, name: str) -> list[int]:
        """A tensor's shape."""
        return list(self._file.get_slice(name).get_shape())

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return {name: self.tensor(name) for name in self.names}

    @cached_property
    def states(self) -> dict[str, list[str]]:
        """Key of a parameter of an optimizer → names of what it holds, such as `exp_avg`."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.names):
            key, _, state = name.rpartition(".")
            found.setdefault(key, []).append(state)
        return found

    @cached_property
    def places(self) -> dict[str, list[tuple[int, int, str]]]:
        """A model parameter's tensor → start, end and key of what the optimizer holds of its values.

        Raises:
            ConfigError: the file does not say it.
        """
        recorded = self.about.get("places")
        if recorded is None:
            raise ConfigError(
                f"{self.path}: it is of a release that does not say which parameter each state of the optimizer belongs to: it can be "
                "loaded with its own layout, or without its optimizer (checkpoint.no_load_optim, checkpoint.finetune)"
            )
        found: dict[str, list[tuple[int, int, str]]] = {}
        for key, (tensor, start, end) in recorded.items():
            found.setdefault(tensor, []).append((int(start), int(end), key))
        return found


class SavedState:
    """The ranks' files of a checkpoint, opened when they are needed; a context, which closes them."""

    def __init__(self, folder: Path) -> None:
        """Opens the first. Raises ConfigError when it is missing or damaged."""
        self.folder = folder
        self._stack = ExitStack()
        first = RankFile(folder / rank_file(0), self._stack)
        self._ranks = {0: first}
        self.about, self.layout = first.about, first.layout
        self.tp_size, self.pp_size, dp_size, cp_size = (int(str(self.layout[size])) for size in SIZES)
        self.replicas = dp_size * cp_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rank(self, rank: int) -> RankFile:
        """One rank's file. Raises ConfigError when it is missing or damaged, or of another layout than the first."""
        if rank not in self._ranks:
            file = RankFile(self.folder / rank_file(rank), self._stack)
            if file.layout != self.layout:
                raise ConfigError(f"{file.path}: its layout is {file.layout}, and that of {rank_file(0)} {self.layout}")
            self._ranks[rank] = file
        return self._ranks[rank]

    def names(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Global name in Megatron → stage, and name of the tensor in its files, of the role with this prefix; empty if it has none."""
        begin = f"{prefix}model."
        found: dict[str, tuple[int, str]] = {}
        before = 0
        for stage in range(self.pp_size):
            own = [name for name in self._rank(stage, 0).names if name.startswith(begin)]
            layers = {int(match[1]) for name in own if (match := _LAYER.search(name))}
            for name in own:
                found[_shifted(name.removeprefix(begin), before)] = (stage, name)
            before += len(layers)
        return found

    def weight(self, stage: int, name: str) -> list[torch.Tensor]:
        """A parameter: the part of each tensor-parallel rank."""
        return [self._rank(stage, tp).tensor(name) for tp in range(self.tp_size)]

    def shape(self, stage: int, name: str) -> list[int]:
        """The shape of one of these parts."""
        return self._rank(stage, 0).shape(name)

    def optimizer(self, stage: int, name: str) -> SavedValues:
        """What the optimizer holds of a parameter, put together over the replicas."""
        values = [self._optimizer(stage, tp, name) for tp in range(self.tp_size)]
        parts = {state: [value.parts[state][0] for value in values] for state in values[0].parts}
        return SavedValues(parts, values[0].numbers, values[0].counter)

    def _optimizer(self, stage: int, tp: int, name: str) -> SavedValues:
        """What the ranks of one stage and one tensor-parallel part hold."""
        shape = self._rank(stage, tp).shape(name)
        pieces = {
            start: (end, key, rank)
            for rank in (self._rank(stage, tp, replica) for replica in range(self.replicas))
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


def _shifted(name: str, layers: int) -> str:
    """The name with this many layers before those of its file."""
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + layers}.", name)
