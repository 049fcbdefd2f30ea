"""Sharded role: a role's parameters in a checkpoint of backend fsdp2, put together from the rows of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.common.errors import ConfigError
from services.common.models.weight_files import LM_HEAD
from services.common.spec.rollout import LoraSpec
from services.learner.conversion.request import RoleName
from services.learner.fsdp2 import adapters
from services.learner.training.rank_file import RankFile, rank_file
from services.learner.training.tensor_file import Weights
from services.learner.training.value_head import HF_NAME, SAVED_NAME


class ShardedRole:
    """Under its Hugging Face names, adapters merged."""

    def __init__(self, folder: Path, role: RoleName, model_dir: Path, lora: LoraSpec | None, stack: ExitStack) -> None:
        """Opens the files until the stack is closed. `model_dir`: has the weights that adapters stand on.

        Raises:
            ConfigError: the checkpoint does not have the role, or a file is missing or damaged.
        """
        first = RankFile(folder / rank_file(0), stack)
        size = int(str(first.layout["fsdp_size"]))
        self._files = [first, *(RankFile(folder / rank_file(rank), stack) for rank in range(1, size))]
        self._prefix, self._lora = f"{role.prefix}model.", lora
        self._saved = {name.removeprefix(self._prefix) for name in first.names if name.startswith(self._prefix)}
        if not self._saved:
            has = [
                other.value
                for other in RoleName
                if any(name.startswith(f"{other.prefix}model.") for name in first.names)
            ]
            raise ConfigError(f"--role {role}: {folder} has none (it has: {', '.join(has)})")
        self._base: dict[str, Any] = {}
        if any(map(adapters.is_adapter, self._saved)):
            files = [
                stack.enter_context(safe_open(path, framework="pt")) for path in sorted(model_dir.glob("*.safetensors"))
            ]
            self._base = {name: file for file in files for name in file.keys()}  # noqa: SIM118  it is no dict
        plain = {name for name in self._saved | self._base.keys() if not adapters.is_adapter(name)}
        self.names = {HF_NAME if name == SAVED_NAME else name for name in plain}
        """Tensors that it can give; of a tied model without `lm_head.weight`."""
        self._embedding = next((name for name in plain if name.endswith("embed_tokens.weight")), LM_HEAD)

    def shapes(self, names: Mapping[str, object]) -> dict[str, torch.Size]:
        """The shapes of these tensors."""
        return {name: self._shape(self._key(name)) for name in names}

    def load(self, names: list[str], dtypes: Mapping[str, torch.dtype]) -> Weights:
        """These tensors, contiguous."""
        return {name: self._merged(self._key(name)).to(dtypes[name]).contiguous() for name in names}

    def _key(self, name: str) -> str:
        if name == HF_NAME:
            return SAVED_NAME
        return self._embedding if name == LM_HEAD and name not in self.names else name

    def _shape(self, name: str) -> torch.Size:
        if name not in self._saved:
            return torch.Size(self._base[name].get_slice(name).get_shape())
        parts = [file.shape(f"{self._prefix}{name}") for file in self._files]
        return torch.Size([sum(part[0] for part in parts), *parts[0][1:]])

    def _merged(self, name: str) -> torch.Tensor:
        weight = self._whole(name)
        layer = name.removesuffix(".weight")
        if self._lora is None or f"{layer}{adapters.A}" not in self._saved:
            return weight
        a, b = self._whole(f"{layer}{adapters.A}"), self._whole(f"{layer}{adapters.B}")
        return torch.addmm(weight.float(), b, a, alpha=adapters.scale_of(self._lora)).to(weight.dtype)

    def _whole(self, name: str) -> torch.Tensor:
        if name not in self._saved:
            tensor: torch.Tensor = self._base[name].get_tensor(name)
            return tensor
        return torch.cat([file.tensor(f"{self._prefix}{name}") for file in self._files])
