"""Skeleton of a model: the names of its parameters in Megatron and Hugging Face, and where each is split; no weights.

It is a Megatron model of one layer: all layers of a model have the same parameters.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from services.common.config.settings import Platform
from services.common.errors import ModelError
from services.common.spec.learner import LearnerSpec
from services.learner.megatron.bridges import make_bridge, read_config
from services.learner.megatron.model import transformer_settings
from services.learner.megatron.parallel import join
from services.learner.megatron.parts import is_split
from services.learner.training.pools import ACTOR, join_ranks

_LAYER = re.compile(r"decoder\.layers\.\d+\.")
OUTPUT_LAYER, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Names and splits. Names are Megatron's global ones, unless they are said to be Hugging Face's."""

    bridge: Any
    layers: int
    tied: bool
    """Whether embedding and output layer are one tensor."""
    _parameters: dict[str, torch.Tensor]
    """Those of a model of one layer."""

    @classmethod
    def of(cls, model_dir: Path, dtype: torch.dtype) -> Self:
        """Of the config.json in a directory; joins a process group of one. Raises ModelError for an architecture without a bridge."""
        join_ranks([[ACTOR]], Platform.CPU)
        join(LearnerSpec())
        config, settings = read_config(model_dir), transformer_settings(LearnerSpec())
        small = copy.deepcopy(config)
        small.num_hidden_layers = 1
        bridge = make_bridge(small, dtype, settings)
        chunk = bridge._model_provider([])(pre_process=True, post_process=True)  # noqa: SLF001  see model.py
        return cls(bridge, config.num_hidden_layers, bool(config.tie_word_embeddings), dict(chunk.named_parameters()))

    def names(self) -> list[str]:
        """The parameters of the whole model; with tied embeddings without an output layer."""
        return [
            name.replace("layers.0.", f"layers.{layer}.")
            for name in self._parameters
            for layer in range(self.layers if _LAYER.match(name) else 1)
        ]

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter that is split as this one is, not of its values. Raises ModelError when the model has none of this name."""
        found = self._parameters.get(_LAYER.sub("decoder.layers.0.", name))
        if found is None:
            raise ModelError(f"{name} is no parameter of the model in config.json")
        return found

    def whole_shape(self, name: str, part: list[int], tp_size: int) -> list[int]:
        """The whole parameter's shape, from that of one of `tp_size` parts."""
        parameter, shape = self.parameter(name), list(part)
        if is_split(parameter):
            shape[parameter.partition_dim] *= tp_size  # type: ignore[attr-defined]
        return shape

    def hugging_face_names(self, name: str) -> list[str]:
        """The tensors of a Hugging Face directory that a parameter is made of."""
        return list(self.bridge._weight_name_mapping_mcore_to_hf(name))  # noqa: SLF001

    def to_hugging_face(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """These tensors of a whole parameter."""
        return dict(zip(*self.bridge._weight_to_hf_format(name, whole), strict=True))  # noqa: SLF001

    def to_megatron(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The whole parameter of these tensors, in the skeleton's dtype."""
        whole: torch.Tensor = self.bridge._weight_to_mcore_format(name, tensors)  # noqa: SLF001
        return whole
