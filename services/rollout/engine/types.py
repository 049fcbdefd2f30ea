"""Types of the engine's input and output: pieces of rollouts, chats and their refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
