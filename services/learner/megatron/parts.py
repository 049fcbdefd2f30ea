"""Parts of a parameter over tensor-parallel ranks, for any number of them; the parts' order within a parameter is mbridge's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch


def is_split(parameter: torch.Tensor) -> bool:
    """Whether each tensor-parallel rank holds another part of it, however many there are."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def merge_parts(bridge: Any, name: str, parts: Sequence[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  mbridge comes without types
    """The whole of the parts that as many ranks hold, in the order of the ranks.

    Args:
        bridge: the model's.
        name: the parameter's global name in Megatron, which says how its parts lie.
        parts: of the parameter, or of values of its shape, such as moments.
        parameter: in any layout; it says whether and where it is split.
    """
    if len(parts) == 1 or not is_split(parameter):
        return parts[0]
    merging = copy.copy(bridge)
    merging.mpu = replace(bridge.mpu, tp_size=len(parts))
    whole: torch.Tensor = merging._weight_merge_across_tp(name, list(parts), parameter)  # noqa: SLF001
    return whole


def split_parts(
    bridge: Any,  # noqa: ANN401
    name: str,
    whole: torch.Tensor,
    parameter: torch.Tensor,
    size: int,
) -> list[torch.Tensor]:
    """The parts of `size` ranks, in their order: the reverse of `merge_parts`. A parameter that is not split is whole on each."""
    if size == 1 or not is_split(parameter):
        return [whole] * size
    shape = list(whole.shape)
    shape[parameter.partition_dim] //= size  # type: ignore[attr-defined]
    part = torch.empty(shape, device="meta")  # mbridge finds the dimension by the shape of a part
    return list(bridge._weight_split_across_tp(name, whole, part, size))  # noqa: SLF001
