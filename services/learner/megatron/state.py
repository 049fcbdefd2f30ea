"""State of a rank: its part of a checkpoint, one safetensors file with weights, master weights, moments and random states; no pickles.

    actor      model.…             optimizer.…
    critic     critic.model.…      critic.optimizer.…
    reference  reference.model.…

Training continues bit for bit from it. It fits only the layout that it was saved with; another layout starts from the Hugging Face export.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.common.checkpoints.manifest import WrittenFile
from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.learner.megatron.optimizer import Optimizer
from services.learner.megatron.parallel import Layout
from services.learner.megatron.platform import rng_states, set_rng_states
from services.learner.megatron.tensor_file import write_tensors

FORMAT = 2


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A rank's state at one moment, in host memory."""

    name: str
    tensors: dict[str, torch.Tensor]
    about: str

    def write(self, folder: Path) -> WrittenFile:
        """Writes the file durably."""
        return write_tensors(folder, self.name, self.tensors, {"about": self.about})


def rank_file(rank: int) -> str:
    """Name of a rank's file in a checkpoint's directory."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Role:
    """A model of this rank, and its optimizer if it is trained."""

    name: str
    """Prefix of its tensors; empty for the actor, whose names are those of all releases."""
    chunk: torch.nn.Module
    optimizer: Optimizer | None

    @property
    def prefix(self) -> str:
        """Begin of its tensors' names."""
        return f"{self.name}." if self.name else ""

    def groups(self) -> list[tuple[str, torch.optim.Optimizer, dict[str, Any], torch.Tensor]]:
        """Every parameter that its optimizer updates: a key that is stable over restarts, optimizer, group, parameter."""
        return [
            (f"{self.prefix}optimizer.{o}.{g}.{p}", part, group, parameter)
            for o, part in enumerate(self.optimizer.parts if self.optimizer is not None else [])
            for g, group in enumerate(part.param_groups)
            for p, parameter in enumerate(group["params"])
        ]

    def model(self) -> dict[str, torch.Tensor]:
        """Its parameters."""
        return {f"{self.prefix}model.{name}": parameter for name, parameter in self.chunk.named_parameters()}


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What a checkpoint's part held beside the tensors."""

    step: int
    kl_coefficient: float | None
    """The adaptive β of the KL to the reference; None in the checkpoint of a job whose β is constant, or that has none."""
    absent: set[str]
    """Roles of the job that it has nothing of."""


@dataclass(slots=True)
class RankState:
    """Copies and loads the state of this rank."""

    _spec: JobSpec
    _platform: Platform
    _layout: Layout
    _roles: list[Role]
    """The actor first."""

    def copy(self, step: int, kl_coefficient: float | None) -> StateCopy:
        """Copies the present state; training may continue. `kl_coefficient`: see LoadedState."""
        tensors = self._weights(self._roles)
        counters: dict[str, Any] = {}
        for key, part, group, parameter in (item for role in self._roles for item in role.groups()):
            counters[key] = group.get("step")
            for name, value in part.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = torch.as_tensor(value)
        tensors |= {f"rng.{name}": value for name, value in rng_states(self._platform).items()}
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        about = {
            "format": FORMAT, "step": step, "layout": self._described_layout(), "counters": counters, "kl_coefficient": kl_coefficient,
        }  # fmt: skip
        return StateCopy(rank_file(self._layout.rank), copies, json.dumps(about))

    def load(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> LoadedState:
        """Restores the state. Without `optimizer` the moments stay new; without `rng` the random states stay.

        A role that the checkpoint has nothing of stays as it is.

        Raises:
            ConfigError: this rank's file is missing, was saved with another layout, or lacks a tensor.
        """
        path = folder / rank_file(self._layout.rank)
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; the checkpoint was saved by fewer ranks")
        with safe_open(path, framework="pt", device="cpu") as file:
            about = json.loads(file.metadata()["about"])
            self._check(path, about)
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        absent = {role.name for role in self._roles if role.name and stored.keys().isdisjoint(role.model())}
        roles = [role for role in self._roles if role.name not in absent]
        with torch.no_grad():
            for name, tensor in self._weights(roles, masters=optimizer).items():
                if name not in stored:
                    raise ConfigError(f"{path}: tensor {name} is missing")
                tensor.copy_(stored[name])
        for role in roles:
            if optimizer:
                _load_moments(role, about, stored)
            elif role.optimizer is not None:
                role.optimizer.follow_weights()
        if rng:
            states = {name.removeprefix("rng."): value for name, value in stored.items() if name.startswith("rng.")}
            set_rng_states(self._platform, states)
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

    def _check(self, path: Path, about: dict[str, Any]) -> None:
        if about["format"] != FORMAT:
            raise ConfigError(f"{path}: format {about['format']} is not known (this is format {FORMAT})")
        for name, value in self._described_layout().items():
            if about["layout"].get(name) != value:
                raise ConfigError(f"{path}: saved with {name} = {about['layout'].get(name)}, and now it is {value}")


def _load_moments(role: Role, about: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    device = next(role.chunk.parameters()).device
    for key, part, group, parameter in role.groups():
        if about["counters"][key] is not None:
            group["step"] = about["counters"][key]
        prefix = f"{key}."
        moments = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
        part.state[parameter] = {
            name: value.clone() if name == "step" else value.to(device, copy=True)
            for name, value in moments.items()
            if name != "master"
        }
