"""Types of the engine's input and output: staged weights, pieces of rollouts, chats and their refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.config.inference import RefusalReason
from services.common.errors import MillraceError


class ChatRefused(MillraceError):  # noqa: N818  a refusal is no fault of the server
    """A chat request that is not answered, or not to its end; the message is for the user."""

    def __init__(self, message: str, reason: RefusalReason, *, param: str | None = None) -> None:
        """`param`: the field of the request that causes the refusal, if one does."""
        super().__init__(message)
        self.reason, self.param = reason, param


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """Sampling parameters of one answer."""

    max_tokens: int
    temperature: float
    """0 takes the most likely token each time."""
    top_p: float
    stop: Sequence[str] = ()
    """The answer ends before the first of these."""


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """Part of one answer, as the engine streams it; one policy version sampled all of it."""

    text: str
    """May be empty: characters are held back while they may begin a stop string, or are incomplete."""
    tokens: int
    policy_version: int
    finish_reason: str | None
    """Set on the last piece: "stop" or "length"."""


class SamplingError(MillraceError):
    """The engine's output cannot be trained on; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one rollout of a group, as the engine streams it; one policy version sampled all of it."""

    index: int
    """Index of the rollout in its group, from 0."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each token under the engine, at the sampling temperature."""
    policy_version: int
    finish_reason: str | None
    """Set on the last piece: "stop", "length", or "abort" when the engine aborted the request."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A complete and verified policy version in a file that the engine can load."""

    lineage: int
    policy_version: int
    path: Path
    """A safetensors file such as `v1-4-0005.safetensors`; kept until two newer versions are staged."""
    digests: dict[str, str]
    """xxh3-128 of each tensor's plain bytes, in hex."""
    total_bytes: int
    """Plain bytes of all tensors."""
    fetch_s: float
    """Seconds from the request to the verified file."""
    wire_bytes: int
    """Payload bytes received: fewer than `total_bytes` when a delta was sent."""
