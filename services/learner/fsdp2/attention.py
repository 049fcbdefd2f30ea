"""Attention of transformers' models over a row of segments, under the name `millrace` in its attention interface.

transformers makes no mask for an implementation that has none registered. The row's segments reach every layer as the keyword `segments`,
in bytes: fully_shard moves tensors to the device, and they are read on the host.

    plain                                        `shared_attention`: no mask of the row's square
    sliding window, soft cap, unequal head sizes  scores of the whole row, with a mask
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch.nn.functional import softmax
from transformers import AttentionInterface

from services.common.errors import ModelError
from services.learner.training.prompt_sharing import shared_attention

NAME = "millrace"


def register() -> None:
    """Makes the implementation known to transformers; a second call changes nothing."""
    AttentionInterface.register(NAME, attention)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: bytes | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention within a row of segments, as transformers calls it.

    Args:
        module: the model's attention layer.
        query: [1, heads, s, head size].
        key: [1, key-value heads, s, head size].
        value: as `key`.
        attention_mask: None.
        scaling: of the scores; None is 1 / √head size.
        dropout: 0: a policy is trained on the distribution that it samples from.
        segments: bytes of `encode_segments`.
        sliding_window: positions that a query sees, its own included; None: all.
        softcap: bound of the scores, by tanh.
        s_aux: logits of attention sinks, which are not supported.
        position_bias: added to the scores, which is not supported.

    Returns:
        [1, s, heads, head size].

    Raises:
        ModelError: the architecture does not hand the segments on, or needs what is not supported.
    """
    if segments is None or attention_mask is not None or s_aux is not None or position_bias is not None or dropout:
        raise ModelError(f"{type(module).__name__}: this attention is not supported by backend fsdp2")
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    row = torch.frombuffer(bytearray(segments), dtype=torch.int64).view(-1, 2)
    if sliding_window is not None and _longest(row) <= sliding_window:
        sliding_window = None
    if sliding_window is None and not softcap and query.shape[-1] == value.shape[-1]:
        return shared_attention(query, key, value, row, scaling)[None], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = _visible(segments, sliding_window).to(query.device)
    return _masked_attention(query, key, value, visible, scale, softcap)[None], None


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[s, heads, head size], from all scores at once."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", softmax(scores, -1).to(value.dtype), value)


def _longest(segments: torch.Tensor) -> int:
    """Positions of the longest sequence: a prompt with its longest response."""
    longest = prompt = 0
    for length, is_prompt in segments.tolist():
        prompt = length if is_prompt else prompt
        longest = max(longest, prompt if is_prompt else prompt + length)
    return longest


@lru_cache(maxsize=4)
def _visible(encoded: bytes, window: int | None) -> torch.Tensor:
    """Bool [s, s]: whether a query (first axis) attends to a key (second)."""
    segments = np.frombuffer(encoded, np.int64).reshape(-1, 2)
    own, prompt, place = [], [], []
    first = -1
    for i, (length, is_prompt) in enumerate(segments.tolist()):
        first = i if is_prompt else first
        begin = 0 if is_prompt else segments[first, 0]
        own.append(np.full(length, i))
        prompt.append(np.full(length, first))
        place.append(begin + np.arange(length))
    ids, prompts, positions = (torch.from_numpy(np.concatenate(parts)) for parts in (own, prompt, place))
    distance = positions[:, None] - positions[None, :]
    seen = (ids[:, None] == ids[None, :]) | (prompts[:, None] == ids[None, :])
    seen &= distance >= 0
    return seen if window is None else seen & (distance < window)
