"""Resharding: what this rank's file would hold, had the checkpoint been saved with this rank's layout.

saved parts ─► whole parameter ─► part of this tensor-parallel rank ─► for the optimizer: the values that are this data-parallel rank's

Weights, master weights and moments only change their place, not a bit. Random states are a rank's own, and stay behind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from services.common.errors import ConfigError
from services.learner.megatron.parts import merge_parts, split_parts
from services.learner.megatron.role import Role
from services.learner.megatron.saved import SavedPlace, SavedState
from services.learner.training.layout import Layout

OUTPUT_LAYER, INPUT_EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


def reshard(
    saved: SavedState, roles: Iterable[Role], layout: Layout, *, optimizer: bool
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors, and counters of the optimizers' groups, as in this rank's file; without `optimizer` the weights only.

    Roles that the checkpoint has nothing of are left out.

    Raises:
        ConfigError: a tensor is missing, or the files do not say what the optimizer's states belong to; names the file.
    """
    tensors: dict[str, torch.Tensor] = {}
    counters: dict[str, object] = {}
    for role in roles:
        share = _RoleShare(saved, role, layout)
        if not share.is_saved:
            continue
        tensors |= {f"{role.prefix}model.{name}": share.weight(name) for name in role.parameters()}
        if optimizer:
            share.add_optimizer(tensors, counters)
    return tensors, counters


class _RoleShare:
    """This rank's share of one role."""

    def __init__(self, saved: SavedState, role: Role, layout: Layout) -> None:
        self._saved, self._role, self._layout = saved, role, layout
        self._names = saved.names(role.prefix)
        self._global = role.part.bridge._weight_name_mapping_mcore_local_to_global(role.chunk)  # noqa: SLF001
        self._parameters = role.parameters()

    @property
    def is_saved(self) -> bool:
        """Whether the checkpoint has it."""
        return bool(self._names)

    def weight(self, name: str) -> torch.Tensor:
        """The parameter of this local name."""
        mine = self._mine(name, self._saved.weight(self._source(name)))
        return mine.clone(memory_format=torch.contiguous_format)

    def add_optimizer(self, tensors: dict[str, torch.Tensor], counters: dict[str, object]) -> None:
        """Adds what the optimizer holds here, parameter by parameter."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        places = self._role.places()
        for key, _, _, updated in self._role.groups():
            place = places[key]
            name = names[id(place.parameter)]
            held = self._saved.optimizer(self._source(name))
            counters[key] = held.counter
            tensors |= {f"{key}.{state}": value for state, value in held.numbers.items()}
            for state, parts in held.parts.items():
                mine = self._mine(name, parts).flatten()[place.start : place.end].clone()
                tensors[f"{key}.{state}"] = mine.view(updated.shape)

    def _mine(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """This tensor-parallel rank's part: a view, which holds the whole in memory, so callers copy what they keep."""
        bridge, parameter, known = self._role.part.bridge, self._parameters[name], self._global[name]
        merged = merge_parts(bridge, known, parts, parameter)
        return split_parts(bridge, known, merged, parameter, self._layout.tp_size)[self._layout.tp_rank]

    def _source(self, name: str) -> SavedPlace:
        """The place of a parameter; the output layer that a last stage shares with the embedding may be saved only as that."""
        known = self._global[name]
        if known == OUTPUT_LAYER and known not in self._names and self._role.part.tied:
            known = INPUT_EMBEDDING
        if known not in self._names:
            raise ConfigError(f"{self._saved.folder}: {self._role.prefix}model.{known} is in none of its files")
        return self._names[known]
