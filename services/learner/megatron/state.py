"""A rank's part of a checkpoint: one safetensors file with weights, master weights, moments and random states. Nothing is pickled.

Loading it continues bit for bit. It fits only the layout it was saved with; another layout starts from the Hugging Face export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.common.errors import ConfigError
from services.learner.megatron.optimizer import Optimizer
from services.learner.megatron.parallel import Layout
from services.learner.megatron.platform import rng_states, set_rng_states
from services.learner.megatron.settings import TrainerSettings

FORMAT = 1


class RankState:
    """Saves and loads what this rank holds."""

    def __init__(self, settings: TrainerSettings, layout: Layout, chunk: torch.nn.Module, optimizer: Optimizer) -> None:
        """Looks at the model and the optimizer; copies nothing."""
        self._settings = settings
        self._layout = layout
        self._chunk = chunk
        self._optimizer = optimizer

    def path(self, folder: Path) -> Path:
        """This rank's file."""
        return folder / f"rank-{self._layout.rank:05d}.safetensors"

    def save(self, folder: Path, step: int) -> None:
        """Writes this rank's file; whether it is durable is the caller's business."""
        tensors = self._weights()
        counters: dict[str, Any] = {}
        for key, group, parameter in self._groups():
            counters[key] = group.get("step")
            for name, value in self._optimizer_of(key).state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = torch.as_tensor(value)
        tensors |= {f"rng.{name}": value for name, value in rng_states(self._settings.platform).items()}
        # copies: parameters may be slices of one buffer, which the format does not take
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
        about = {"format": FORMAT, "step": step, "layout": self._described_layout(), "counters": counters}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(copies, self.path(folder), metadata={"about": json.dumps(about)})

    def load(self, folder: Path) -> int:
        """Puts everything back and gives the step.

        Raises:
            ConfigError: this rank's file is missing, was saved with another layout, or lacks a tensor.
        """
        path = self.path(folder)
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file; the checkpoint was saved by fewer ranks")
        device = next(self._chunk.parameters()).device
        with safe_open(path, framework="pt", device="cpu") as file:
            about = json.loads(file.metadata()["about"])
            self._check(path, about)
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        with torch.no_grad():
            for name, tensor in self._weights().items():
                if name not in stored:
                    raise ConfigError(f"{path}: tensor {name} is missing")
                tensor.copy_(stored[name])
        for key, group, parameter in self._groups():
            if about["counters"][key] is not None:
                group["step"] = about["counters"][key]
            prefix = f"{key}."
            moments = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
            self._optimizer_of(key).state[parameter] = {
                name: value.clone() if name == "step" else value.to(device, copy=True)
                for name, value in moments.items()
                if name != "master"
            }
        rng = {name.removeprefix("rng."): value for name, value in stored.items() if name.startswith("rng.")}
        set_rng_states(self._settings.platform, rng)
        return int(about["step"])

    def _weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {
            f"model.{name}": parameter for name, parameter in self._chunk.named_parameters()
        }
        if self._settings.dtype == "bfloat16":
            weights |= {f"{key}.master": parameter for key, _, parameter in self._groups()}
        return weights

    def _groups(self) -> list[tuple[str, dict[str, Any], torch.Tensor]]:
        """Every parameter that an optimizer of this rank updates, with its group and a key that is the same after a restart."""
        return [
            (f"optimizer.{o}.{g}.{p}", group, parameter)
            for o, part in enumerate(self._optimizer.parts)
            for g, group in enumerate(part.param_groups)
            for p, parameter in enumerate(group["params"])
        ]

    def _optimizer_of(self, key: str) -> torch.optim.Optimizer:
        return self._optimizer.parts[int(key.split(".")[1])]

    def _described_layout(self) -> dict[str, object]:
        return {
            **self._layout.sizes,
            "use_distributed_optimizer": self._settings.use_distributed_optimizer,
            "dtype": self._settings.dtype,
        }

    def _check(self, path: Path, about: dict[str, Any]) -> None:
        if about["format"] != FORMAT:
            raise ConfigError(f"{path}: format {about['format']} is not known (this is format {FORMAT})")
        for name, value in self._described_layout().items():
            if about["layout"].get(name) != value:
                raise ConfigError(f"{path}: saved with {name} = {about['layout'].get(name)}, and now it is {value}")
