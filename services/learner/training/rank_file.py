"""File of one rank in a checkpoint: tensors, and beside them JSON of what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.common.errors import ConfigError
from services.common.spec.learner import BackendName
from services.learner.training.backend import LoadedState

FORMAT = 2


def rank_file(rank: int, pool: str = "") -> str:
    """Name of a rank's file in a checkpoint's directory; `pool`: its role, of a rank that is not the actor's."""
    return f"{pool}{'-' if pool else ''}rank-{rank:05d}.safetensors"


def pool_of(role: str, folder: Path) -> str:
    """The ranks whose files hold this role: its own, where there are such, or the actor's."""
    return role if role and (folder / rank_file(0, role)).exists() else ""


def load_by_pool(roles: Iterable[str], folder: Path, load: Callable[[set[str], str], LoadedState]) -> LoadedState:
    """Restores a rank's roles with `load(roles, pool)`, called once for each pool whose files hold some of them."""
    pools = {role: pool_of(role, folder) for role in roles}
    parts = [load({role for role in pools if pools[role] == pool}, pool) for pool in dict.fromkeys(pools.values())]
    return replace(parts[0], absent=set().union(*(part.absent for part in parts)))


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
        # files of a release without context or expert parallelism do not name its size
        return {"context_parallel_size": 1, "expert_parallel_size": 1, **self.about["layout"]}

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


def check_backend(file: RankFile, here: BackendName) -> None:
    """Raises ConfigError for the file of another back end; one that does not name it is Megatron's."""
    saved = file.layout.get("backend", BackendName.MEGATRON.value)
    if saved != here.value:
        raise ConfigError(
            f"{file.path.parent}: saved by backend {saved}, and learner.backend is {here.value}: begin from its Hugging Face directory "
            "(`checkpoint.load: CHECKPOINT/hf`), or keep its backend"
        )
