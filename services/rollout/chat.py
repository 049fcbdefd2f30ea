"""What one chat request asks of the engine, what it gets, and how it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import MillraceError
from services.common.inference_channel import Problem

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
