"""Types of the stream entries, in the order of their way:  Task → RolloutGroup → ScoredGroup.

Arrays are little-endian binary so that a token costs 8 bytes (4 for its id, 4 for its log-prob) and nothing is parsed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

LATER: Mapping[str, bool] = {"later": True}
"""Metadata of a field that earlier releases do not know: an entry that does not use it has the bytes that they would write."""

_CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""An ordinal, a version or a size: never negative, exact in every language's numbers."""


class Purpose(StrEnum):
    """Purpose of a group."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Reason why a rollout ended."""

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    """The environment went on after the last turn that the task allows."""
    CONTEXT = "context"
    """What the environment said left no room for another turn."""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended the rollout."""
        return self in {FinishReason.LENGTH, FinishReason.CONTEXT}


class VerdictStatus(StrEnum):
    """Outcome of a check. FAILED carries no reward: nothing is known about the response."""

    SCORED = "scored"
    TIMEOUT = "timeout"
    """The check exceeded its limit of time, memory or nesting: the response caused it, and counts as wrong."""
    FAILED = "failed"
    """The verifier broke, twice, or its process did: the response is not judged."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message of a prompt, or of what an environment says."""

    __pydantic_config__ = _CHECKED
    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class EnvironmentCall:
    """The environment that a task's rollouts are played in, one episode each, and their limits.

    Example: EnvironmentCall("guess_number", {"width": 7}, seed=17, max_turns=3, max_turn_tokens=8, max_observation_tokens=64,
    step_timeout_s=2.0)
    """

    __pydantic_config__ = _CHECKED
    name: str
    config: dict[str, Any]
    """JSON values only."""
    seed: Count
    """Episodes of the same name, config and seed begin alike."""
    max_turns: Count
    """Most turns that are sampled."""
    max_turn_tokens: Count
    """Most tokens of one of them; `Task.max_tokens` bounds all that comes after the prompt, observed tokens included."""
    max_observation_tokens: Count
    """Most tokens of what the environment says at once; more is a failure of the environment."""
    step_timeout_s: float
    """Longest wait for the environment's answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """learner → rollout: sample `group_size` completions of this prompt.

    Example: Task(job_id="demo-3f2a", lineage=1, group_id=17, attempt=1, purpose=Purpose.TRAIN, prompt=(Message("user", "2 + 3 ="),),
    data_source="reasoning_gym:chain_sum", ground_truth="5", extra_info={}, group_size=8, temperature=1.0, max_tokens=16,
    min_policy_version=4, timeout_s=600.0)
    """

    __pydantic_config__ = _CHECKED
    job_id: str
    lineage: Count
    """Rises with every rollback of the learner; a group of another lineage is stale."""
    group_id: Count
    """Ordinal within the job and purpose, from 0."""
    attempt: Count
    """1 on first issue; a group may be issued again."""
    purpose: Purpose
    prompt: tuple[Message, ...]
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]
    """JSON values only; verifiers may need them."""
    group_size: Count
    temperature: float
    max_tokens: Count
    min_policy_version: Count
    """The server must hold at least this version before it samples."""
    timeout_s: float
    """Time limit of the server for the group, from its start on it."""
    rollout_timeout_s: float | None = None
    """Time limit for sampling, from the first request on; None: only that of the group."""
    min_group_size: Count | None = None
    """With so many complete rollouts at a deadline the group continues without the others; None: it needs all of them."""
    environment: EnvironmentCall | None = field(default=None, metadata=LATER)
    """Where the rollouts are played; then `prompt` is empty, as the environment's first messages are the prompt."""

    @property
    def member(self) -> str:
        """Name of this issue of the group in dedupe sets: `train:1:17:1`."""
        return f"{self.purpose}:{self.lineage}:{self.group_id}:{self.attempt}"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens from `start` on were sampled by `policy_version`, up to the next span."""

    __pydantic_config__ = _CHECKED
    start: Count
    policy_version: Count


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: tokens that the environment or the chat template wrote, then tokens that the policy sampled."""

    __pydantic_config__ = _CHECKED
    observed: Count
    """0 in the first turn: what comes before it is the prompt."""
    sampled: Annotated[int, Field(ge=1, lt=2**53)]
    finish_reason: FinishReason
    """`stop` or `length`."""
    reward: float | None = None
    """Of this turn alone, where the environment gives one."""
    said: tuple[Message, ...] = field(default=(), metadata=LATER)
    """What the policy answers: the environment's messages. Empty once judged, as `text`."""
    text: str = field(default="", metadata=LATER)
    """Decoded reply, special tokens left out."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What the environment said of the whole episode at its end."""

    __pydantic_config__ = _CHECKED
    reward: float
    accuracy: Annotated[float, Field(ge=0.0, le=1.0)]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion, or one episode: then its tokens are all that comes after the prompt, in the order of its turns."""

    __pydantic_config__ = _CHECKED
    token_ids: bytes
    """int32 little-endian [T]."""
    inference_logprobs: bytes
    """float32 little-endian [T]: log-prob of each token under the engine, at the sampling temperature; 0 of an observed one."""
    text: str
    """Decoded response, special tokens left out. Empty once judged: the learner needs no text."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """An observed token has the version of the one before it."""
    turns: tuple[Turn, ...] = field(default=(), metadata=LATER)
    """Of an episode; empty: all tokens were sampled, in one turn."""
    outcome: EpisodeOutcome | None = field(default=None, metadata=LATER)
    """Of an episode that the environment ended."""

    def __post_init__(self) -> None:
        tokens, logprobs = len(self.token_ids), len(self.inference_logprobs)
        if tokens % 4 or tokens != logprobs:
            raise ValueError(f"token_ids ({tokens} bytes) and inference_logprobs ({logprobs} bytes) disagree")
        if not self.versions or self.versions[0].start != 0:
            raise ValueError("versions must begin at token 0")
        pairs = zip(self.versions, self.versions[1:], strict=False)
        if any(a.start > b.start or a.policy_version >= b.policy_version for a, b in pairs):
            raise ValueError("versions must only grow")
        if self.turns and self.turns[0].observed:
            raise ValueError("turns must begin with a sampled token")
        if self.turns and 4 * sum(turn.observed + turn.sampled for turn in self.turns) != tokens:
            raise ValueError(f"turns do not have the {tokens // 4} tokens of token_ids")

    @property
    def sampled(self) -> BoolArray:
        """Whether the policy sampled each token, bool [T]."""
        if not self.turns:
            return np.ones(len(self.token_ids) // 4, np.bool_)
        counts = [count for turn in self.turns for count in (turn.observed, turn.sampled)]
        return np.repeat(np.tile([False, True], len(self.turns)), counts)

    @property
    def sampled_tokens(self) -> int:
        """How many those are."""
        return sum(turn.sampled for turn in self.turns) if self.turns else len(self.token_ids) // 4

    @property
    def tokens(self) -> Int32Array:
        """Response tokens, int32 [T]."""
        return np.frombuffer(self.token_ids, TOKEN_DTYPE)

    @property
    def logprobs(self) -> Float32Array:
        """Log-probs under the engine, float32 [T]."""
        return np.frombuffer(self.inference_logprobs, LOGPROB_DTYPE)

    @property
    def token_versions(self) -> Int32Array:
        """Version that sampled each token, int32 [T]."""
        ends = [span.start for span in self.versions[1:]] + [len(self.tokens)]
        counts = [end - span.start for span, end in zip(self.versions, ends, strict=True)]
        return np.repeat(np.array([span.policy_version for span in self.versions], np.int32), counts)

    @property
    def min_policy_version(self) -> int:
        """Oldest version that sampled a token of this rollout."""
        return self.versions[0].policy_version

    @property
    def max_policy_version(self) -> int:
        """Newest version that sampled a token of this rollout."""
        return self.versions[-1].policy_version

    @property
    def without_text(self) -> Self:
        """The rollout as the learner needs it."""
        turns = tuple(replace(turn, said=(), text="") for turn in self.turns)
        return replace(self, text="", turns=turns)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """rollout → reward: the rollouts of one task, or the reason why there are none."""

    __pydantic_config__ = _CHECKED
    task: Task
    server: str
    prompt_token_ids: bytes
    """int32 little-endian [P]."""
    rollouts: tuple[Rollout, ...]
    generate_s: float
    """Wall-clock seconds from start to last token."""
    failure: str | None = None
    """Reason why the group could not be sampled (for example a prompt that is too long); then `rollouts` is empty."""
    permanent: bool = False
    """Of a failure: it would happen again if the task were issued again."""

    def __post_init__(self) -> None:
        if len(self.prompt_token_ids) % 4:
            raise ValueError(f"prompt_token_ids has {len(self.prompt_token_ids)} bytes: no whole number of token ids")

    @property
    def prompt_tokens(self) -> Int32Array:
        """Prompt tokens, int32 [P]."""
        return np.frombuffer(self.prompt_token_ids, TOKEN_DTYPE)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, in all rollouts."""
        return sum(rollout.sampled_tokens for rollout in self.rollouts)

    @property
    def min_policy_version(self) -> int:
        """Oldest version in the group (of a failed group: the version requested)."""
        return min((r.min_policy_version for r in self.rollouts), default=self.task.min_policy_version)

    @property
    def max_policy_version(self) -> int:
        """Newest version in the group (of a failed group: the version requested)."""
        return max((r.max_policy_version for r in self.rollouts), default=self.task.min_policy_version)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a verifier for one rollout."""

    __pydantic_config__ = _CHECKED
    status: VerdictStatus
    reward: float | None
    """None when FAILED. Of a TIMEOUT the lowest reward of the verifier; None in groups judged by releases that gave it none."""
    accuracy: float | None
    """0..1, before any shaping; dynamic sampling compares it. None where there is no reward, 0 when a TIMEOUT has one."""
    verifier: str
    detail: str = ""

    def __post_init__(self) -> None:
        judged = self.reward is not None
        if judged != (self.accuracy is not None):
            raise ValueError("a verdict has both reward and accuracy, or neither")
        if judged is not (self.status is VerdictStatus.SCORED) and self.status is not VerdictStatus.TIMEOUT:
            raise ValueError(f"a verdict of status {self.status} has {'a' if judged else 'no'} reward")
        if self.status is VerdictStatus.TIMEOUT and self.accuracy:
            raise ValueError("a check beyond its limit has accuracy 0")


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """reward → learner: the group (text left out) with one verdict per rollout, in the rollouts' order."""

    __pydantic_config__ = _CHECKED
    group: RolloutGroup
    verdicts: tuple[Verdict, ...]
    judge_s: float
    """Wall-clock seconds of the verifiers."""

    def __post_init__(self) -> None:
        if len(self.verdicts) != len(self.group.rollouts):
            raise ValueError(f"{len(self.verdicts)} verdicts for {len(self.group.rollouts)} rollouts")
