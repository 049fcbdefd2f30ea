"""State of a rank: its part of a checkpoint, one safetensors file with weights, master weights, moments and random states; no pickles.

    actor      model.…             optimizer.…
    critic     critic.model.…      critic.optimizer.…
    reference  reference.model.…

In the layout that it was saved with, training continues bit for bit from it. Another layout gets the same weights, master weights and
moments, each value at its new place (`resharding`), and new random states; its sums then round in another order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.spec.job import JobSpec
from services.common.spec.learner import BackendName
from services.common.spec.rollout import DType
from services.learner.megatron.platform import set_tracked_states, tracked_states
from services.learner.megatron.resharding import reshard
from services.learner.megatron.role import Role
from services.learner.megatron.saved import LAYOUT, SavedState
from services.learner.training.backend import LoadedState, StateCopy
from services.learner.training.layout import Layout
from services.learner.training.platform import rng_states, set_rng_states
from services.learner.training.rank_file import FORMAT, check_backend, load_by_pool, rank_file

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankState:
    """Copies and loads the state of this rank."""

    _spec: JobSpec
    _platform: Platform
    _layout: Layout
    _pool: str
    """What the names of this rank's files begin with."""
    _roles: list[Role]
    """The actor first, if it is in this pool."""

    def copy(self, step: int, kl_coefficient: float | None) -> StateCopy:
        """Copies the present state; training may continue. `kl_coefficient`: see LoadedState."""
        tensors = self._weights(self._roles)
        counters: dict[str, Any] = {}
        places: dict[str, tuple[str, int, int]] = {}
        for role in self._roles:
            places |= role.described_places()
            for key, part, group, parameter in role.groups():
                counters[key] = group.get("step")
                for name, value in part.state.get(parameter, {}).items():
                    tensors[f"{key}.{name}"] = torch.as_tensor(value)
        random = rng_states(self._platform) | tracked_states(self._platform)
        tensors |= {f"rng.{name}": value for name, value in random.items()}
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        about = {
            "format": FORMAT, "step": step, "layout": self._described_layout(), "counters": counters, "places": places,
            "kl_coefficient": kl_coefficient,
        }  # fmt: skip
        return StateCopy(rank_file(self._layout.rank, self._pool), copies, json.dumps(about))

    def load(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> LoadedState:
        """Restores the state. Without `optimizer` the moments stay new; without `rng`, or in another layout, the random states stay.

        A role that the checkpoint has nothing of stays as it is.

        Raises:
            ConfigError: a file is missing, or lacks a tensor; with `optimizer` also: another dtype, or, in another layout, files of a
                release that does not say what the optimizer's states belong to.
        """
        names = [role.name for role in self._roles]
        return load_by_pool(names, folder, partial(self._load, folder, optimizer=optimizer, rng=rng))

    def _load(self, folder: Path, names: set[str], pool: str, *, optimizer: bool, rng: bool) -> LoadedState:
        """Restores these roles from the files of one pool, and from those of this one the random states."""
        roles = [role for role in self._roles if role.name in names]
        with SavedState(folder, pool) as saved:
            check_backend(saved.rank(0), BackendName.MEGATRON)
            self._check_dtype(saved, optimizer=optimizer)
            layout = self._described_layout()
            same = all(saved.layout.get(name) == layout[name] for name in LAYOUT)
            if same:
                own = saved.rank(self._layout.rank)
                stored, counters = own.tensors(), own.about["counters"]
            else:
                self._report_resharding(saved)
                stored, counters = reshard(saved, roles, self._layout, optimizer=optimizer)
            about = saved.about
        absent = {role.name for role in roles if role.name and stored.keys().isdisjoint(role.model())}
        roles = [role for role in roles if role.name not in absent]
        with torch.no_grad():
            for name, tensor in self._weights(roles, masters=optimizer).items():
                if name not in stored:
                    raise ConfigError(f"{folder / rank_file(self._layout.rank, pool)}: tensor {name} is missing")
                tensor.copy_(stored[name])
        for role in roles:
            if optimizer:
                _load_moments(role, counters, stored)
            elif role.optimizer is not None:
                role.optimizer.follow_weights()
        if rng and same and pool == self._pool:
            states = {name.removeprefix("rng."): value for name, value in stored.items() if name.startswith("rng.")}
            set_rng_states(self._platform, states)
            set_tracked_states(states)
        return LoadedState(int(about["step"]), about.get("kl_coefficient"), absent)

    def _weights(self, roles: list[Role], *, masters: bool = True) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        for role in roles:
            weights |= role.model()
            if masters and self._spec.model.dtype is DType.BFLOAT16:
                weights |= {f"{key}.master": parameter for key, _, _, parameter in role.groups()}
        return weights

    def _described_layout(self) -> dict[str, object]:
        return {
            **self._layout.sizes,
            "use_distributed_optimizer": self._spec.learner.use_distributed_optimizer,
            "dtype": self._spec.model.dtype.value,
        }

    def _check_dtype(self, saved: SavedState, *, optimizer: bool) -> None:
        there, here = saved.layout.get("dtype"), self._spec.model.dtype.value
        if optimizer and there != here:
            raise ConfigError(f"{saved.rank(0).path}: saved with dtype = {there}, and now it is {here}")

    def _report_resharding(self, saved: SavedState) -> None:
        if self._layout.rank == 0:
            here = self._described_layout()
            changes = [
                f"{name} {saved.layout.get(name)} → {here[name]}"
                for name in LAYOUT
                if saved.layout.get(name) != here[name]
            ]
            log.info("loading %s in another layout, with new random states: %s", saved.folder, ", ".join(changes))


def _load_moments(role: Role, counters: Mapping[str, object], stored: Mapping[str, torch.Tensor]) -> None:
    device = next(role.chunk.parameters()).device
    for key, part, group, parameter in role.groups():
        if counters[key] is not None:
            group["step"] = counters[key]
        prefix = f"{key}."
        moments = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
        part.state[parameter] = {
            name: value.clone() if name == "step" else value.to(device, copy=True)
            for name, value in moments.items()
            if name != "master"
        }
