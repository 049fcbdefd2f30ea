"""Types of what goes into the engine and comes out of it: staged weights, pieces of rollouts, chats and their refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.config.inference import Problem
from services.common.errors import MillraceError

PRIORITY = 10
"""vLLM's order of requests: training has 0, and the larger number waits and is preempted first."""


class ChatRefused(MillraceError):  # noqa: N818  a refusal, as people say
    """A chat request that is not answered, or not to its end; the message is for the person who asked."""

    def __init__(self, message: str, problem: Problem, *, param: str | None = None) -> None:
        """`param`: the request's field that is to blame, where one is."""
        super().__init__(message)
        self.problem = problem
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """How to sample one answer.

    Example: ChatSampling(max_tokens=64, temperature=0.7, top_p=1.0, stop=("user:",))
    """

    max_tokens: int
    temperature: float
    """0 takes the likeliest token each time."""
    top_p: float
    stop: Sequence[str] = ()
    """The answer ends before the first of these."""


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What the engine streamed of one answer, all sampled by one policy version."""

    text: str
    """May be empty: characters are held back while they may begin a stop string, or are not whole."""
    tokens: int
    policy_version: int
    finish_reason: str | None
    """Set on the last piece: "stop" or "length"."""


class SamplingError(MillraceError):
    """The engine sampled something that cannot be trained on; the message says what."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What the engine streamed of one rollout of a group, all sampled by one policy version.

    Example: Piece(index=3, token_ids=[17], logprobs=[-0.25], policy_version=4, finish_reason=None)
    """

    index: int
    """Which rollout of the group, from 0."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each token under the engine, at the sampling temperature."""
    policy_version: int
    finish_reason: str | None
    """Set on the last piece: "stop", "length", or "abort" when the engine gave the request up."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A policy version, whole and verified, in a file that the engine can load.

    Example: StagedWeights(lineage=1, policy_version=4, path=Path("/dev/shm/millrace-r0/v1-4-0005.safetensors"),
    digests={"model.norm.weight": "0c3f…"}, total_bytes=269_030_016, fetch_s=0.31, wire_bytes=8_412_003)
    """

    lineage: int
    policy_version: int
    path: Path
    """A safetensors file; stays until two newer versions are staged."""
    digests: dict[str, str]
    """xxh3-128 of each tensor's plain bytes, in hex."""
    total_bytes: int
    """Plain bytes of all tensors."""
    fetch_s: float
    """Seconds from the request to the verified file."""
    wire_bytes: int
    """Payload bytes that travelled: fewer than `total_bytes` when a delta was sent."""
