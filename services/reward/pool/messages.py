"""Messages between the pool and its worker processes, as MessagePack over a socket.

pool → worker   [verifier, response, ground_truth, extra_info, limit_s, memory_mib]: several may follow each other
worker → pool   [LOADED, seconds, lowest reward]             before a verifier's first check in this process
                [SCORED, reward, accuracy, detail, seconds]  [LIMIT, reason]  or  [ERROR, reason]: one for each check, at its end
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack

from services.common.errors import VerifierError
from services.common.sandbox.messages import clip

LOADED = "loaded"
SCORED = "scored"
LIMIT = "limit"
ERROR = "error"

MAX_RESPONSE_CHARS = 32_768
"""A longer response is judged by its end (default of `reward.max_chars`).

It is not refused: DAPO, GSM8K and mathematics all take the last answer that a response states, and a refusal would punish long
reasoning. The beginning is cut before any parser reads it.
"""

MEMORY_MIB = 2048
"""Address space of one check (default of `reward.memory_mib`)."""
MAX_GROUND_TRUTH_CHARS = 32_768
"""A longer reference is an error of the dataset."""
MAX_DETAIL_CHARS = 400
"""Of a verdict's detail."""
MAX_REPLY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Check:
    """One response to judge, e.g. Check("gsm8k", "… #### 42", "42", "openai/gsm8k", {"index": 7}, timeout_s=5.0)."""

    verifier: str
    response: str
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any]
    timeout_s: float
    """Wall-clock limit."""
    memory_mib: int = MEMORY_MIB
    """Limit of the worker's address space."""
    max_chars: int = MAX_RESPONSE_CHARS
    """Of a longer response, the end is judged."""

    def pack(self) -> bytes:
        """The message to the worker. Raises VerifierError when the reference is too long, or extra_info cannot be packed."""
        if len(self.ground_truth) > MAX_GROUND_TRUTH_CHARS:
            raise VerifierError(f"ground_truth of {len(self.ground_truth)} characters exceeds {MAX_GROUND_TRUTH_CHARS}")
        extra_info = {**self.extra_info, "data_source": self.data_source, "check_timeout_s": self.timeout_s}
        response = self.response[-self.max_chars :]
        message = [self.verifier, response, self.ground_truth, extra_info, self.timeout_s, self.memory_mib]
        try:
            return bytes(msgpack.packb(message, unicode_errors="replace"))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise VerifierError(f"extra_info cannot be packed: {error}") from error


@dataclass(frozen=True, slots=True)
class Scored:
    """A completed check."""

    reward: float
    accuracy: float
    detail: str
    seconds: float
    """By the worker's clock."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker has imported a verifier; the time limit of the check starts now."""

    seconds: float
    lowest_reward: float
    """Reward of a check beyond its limit."""


@dataclass(frozen=True, slots=True)
class OverLimit:
    """The check needed more time, memory or nesting than allowed: the answer's fault."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The verifier failed, not the answer."""

    reason: str


clean = partial(clip, most_chars=MAX_DETAIL_CHARS)
"""Makes any value of a verifier a text that fits a verdict and is valid UTF-8."""

Outcome = Scored | OverLimit | Broken


def read_reply(message: object) -> Outcome | Loaded:
    """A worker's message, validated: its code may be hostile. Raises VerifierError unless it is one of the four messages."""
    match message:
        case ["scored", float(reward), float(accuracy), str(detail), float(seconds)] if (
            math.isfinite(reward) and 0.0 <= accuracy <= 1.0
        ):
            return Scored(reward, accuracy, clean(detail), seconds)
        case ["loaded", float(seconds), float(lowest)] if math.isfinite(lowest):
            return Loaded(seconds, lowest)
        case ["limit", str(reason)]:
            return OverLimit(clean(reason))
        case ["error", str(reason)]:
            return Broken(clean(reason))
        case _:
            raise VerifierError("its process answered with something that is no reply")
