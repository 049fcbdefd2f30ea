"""State of a rank: its rows of every weight and moment, in one safetensors file; no pickles.

    actor      model.…             optimizer.…
    critic     critic.model.…      critic.optimizer.…
    reference  reference.model.…

With the number of ranks that it was saved with, training continues bit for bit from it. Another number gets the same weights and moments,
each row at its new place, and new random states; its sums then round in another order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.spec.job import JobSpec
from services.common.spec.learner import BackendName
from services.learner.fsdp2.adapters import is_adapter
from services.learner.fsdp2.model import FSDP2Model
from services.learner.fsdp2.sharding import Shards
from services.learner.training.backend import LoadedState, StateCopy
from services.learner.training.layout import Layout
from services.learner.training.platform import rng_states, set_rng_states
from services.learner.training.rank_file import FORMAT, RankFile, check_backend, load_by_pool, rank_file

log = logging.getLogger(__name__)

_RNG = "rng."


@dataclass(frozen=True, slots=True)
class RankState:
    """Copies and loads the state of this rank."""

    spec: JobSpec
    platform: Platform
    layout: Layout
    pool: str
    """What the names of this rank's files begin with."""
    shards: Shards
    models: dict[str, FSDP2Model]
    """By role, the actor first, whose name is empty."""

    def copy(self, step: int, kl_coefficient: float | None) -> StateCopy:
        """Copies the present state."""
        tensors = {f"{_RNG}{name}": value for name, value in rng_states(self.platform).items()}
        for role, model in self.models.items():
            prefix = _prefix(role)
            tensors |= {f"{prefix}model.{name}": parameter.to_local() for name, parameter in _kept(model).items()}
            for name, state in _moments(model).items():
                tensors |= {f"{prefix}optimizer.{name}.{key}": value for key, value in state.items()}
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        about = {"format": FORMAT, "step": step, "layout": self._described_layout(), "kl_coefficient": kl_coefficient}
        return StateCopy(rank_file(self.layout.rank, self.pool), copies, json.dumps(about))

    def load(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> LoadedState:
        """Restores the state; `Backend.load_state` describes it."""
        return load_by_pool(self.models, folder, partial(self._load, folder, optimizer=optimizer, rng=rng))

    def _load(self, folder: Path, roles: set[str], pool: str, *, optimizer: bool, rng: bool) -> LoadedState:
        """Restores these roles from the files of one pool, and from those of this one the random states."""
        with ExitStack() as stack:
            first = RankFile(folder / rank_file(0, pool), stack)
            check_backend(first, BackendName.FSDP2)
            here = self._described_layout()
            same = first.layout == here
            size = int(str(first.layout["fsdp_size"]))
            if same:
                files = [RankFile(folder / rank_file(self.layout.rank, pool), stack)]
            else:
                log.info("loading %s of %s ranks in %s, with new random states", folder, first.layout, here)
                files = [first, *(RankFile(folder / rank_file(rank, pool), stack) for rank in range(1, size))]
            absent = {role for role in roles if role and not _has(first, f"{_prefix(role)}model.")}
            rows = _own_rows(files) if same else _new_rows(files, self.shards)
            with torch.no_grad():
                for role in roles - absent:
                    _load_model(self.models[role], _prefix(role), first, rows, optimizer=optimizer)
            if rng and same and pool == self.pool:
                states = {name: files[0].tensor(name) for name in files[0].names if name.startswith(_RNG)}
                set_rng_states(self.platform, {name.removeprefix(_RNG): value for name, value in states.items()})
        return LoadedState(int(first.about["step"]), first.about.get("kl_coefficient"), absent)

    def _described_layout(self) -> dict[str, object]:
        return {
            "backend": BackendName.FSDP2.value, **self.layout.sizes, "fsdp_size": self.shards.size,
            "dtype": self.spec.model.dtype.value,
        }  # fmt: skip


Rows = Callable[[str], torch.Tensor]
"""A tensor's name in the files → this rank's rows of it."""


def _own_rows(files: list[RankFile]) -> Rows:
    return files[0].tensor


def _new_rows(files: list[RankFile], shards: Shards) -> Rows:
    """From the files of a copy's ranks, whose rows follow each other."""

    def rows(name: str) -> torch.Tensor:
        parts = [file.tensor(name) for file in files]
        if parts[0].dim() == 0:
            return parts[0]
        whole = torch.cat(parts)
        return whole[shards.rows(len(whole))].clone()

    return rows


def _load_model(model: FSDP2Model, prefix: str, first: RankFile, rows: Rows, *, optimizer: bool) -> None:
    stored = {name.removeprefix(f"{prefix}model.") for name in first.names if name.startswith(f"{prefix}model.")}
    if extra := sorted(stored - model.sharded.keys()):
        raise ConfigError(
            f"{first.path}: it has {extra[0]}, and the model has not (model.lora): begin from its hf/ directory"
        )
    has_adapters = any(map(is_adapter, stored))
    for name, parameter in model.sharded.items():
        if name not in stored and _may_be_missing(model, name, has_adapters=has_adapters):
            continue
        parameter.to_local().copy_(rows(f"{prefix}model.{name}"))
    if not optimizer or model.own is None:
        return
    for name, own in model.own.own.items():
        begin = f"{prefix}optimizer.{name}."
        keys = [stored.removeprefix(begin) for stored in first.names if stored.startswith(begin)]
        model.own.adam.state[own] = {key: rows(f"{begin}{key}").to(own.device, copy=True) for key in sorted(keys)}


def _kept(model: FSDP2Model) -> dict[str, DTensor]:
    """What a checkpoint holds: all weights, or with adapters these alone, while the others are those of the model's directory."""
    return model.trained if model.own is not None and model.has_initial_base else model.sharded


def _may_be_missing(model: FSDP2Model, name: str, *, has_adapters: bool) -> bool:
    """Whether the weight stays as it is where a checkpoint does not have it: adapters are new, or stand on the directory's weights."""
    if is_adapter(name):
        return not has_adapters
    return has_adapters and not model.sharded[name].requires_grad


def _moments(model: FSDP2Model) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter → what AdamW keeps of it: `step`, `exp_avg`, `exp_avg_sq`."""
    if model.own is None:
        return {}
    return {name: model.own.adam.state.get(parameter, {}) for name, parameter in model.own.own.items()}


def _has(file: RankFile, begin: str) -> bool:
    return any(name.startswith(begin) for name in file.names)


def _prefix(role: str) -> str:
    return f"{role}." if role else ""
