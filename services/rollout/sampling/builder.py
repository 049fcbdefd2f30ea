"""Builders: one rollout, built piece by piece, and the episode that it may be, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.common.streams.types import (
    LOGPROB_DTYPE,
    TOKEN_DTYPE,
    EpisodeOutcome,
    FinishReason,
    Message,
    Rollout,
    Turn,
    VersionSpan,
)
from services.rollout.engine.types import Piece, SamplingError


class RolloutBuilder:
    """One rollout."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.turns: list[Turn] = []
        """Of an episode, those that ended; a completion has none."""
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._finish_reason: str | None = None
        self._outcome: EpisodeOutcome | None = None
        self._said: tuple[Message, ...] = ()
        self._turn_at = self._sampled_at = 0
        """Where the turn under way begins, and its sampled tokens."""

    @property
    def finished(self) -> bool:
        """Whether the last piece was added, and no turn follows it."""
        return self._finish_reason is not None

    def add(self, piece: Piece) -> None:
        """Appends a piece; a new version starts a new span.

        Raises:
            SamplingError: the numbers of tokens and log-probs differ, the version is older, or the rollout had ended.
        """
        if len(piece.token_ids) != len(piece.logprobs):
            raise SamplingError(f"{len(piece.token_ids)} tokens came with {len(piece.logprobs)} log-probs")
        if self.finished:
            raise SamplingError(f"rollout {piece.index} went on after its end")
        if piece.token_ids:
            newest = self._spans[-1].policy_version if self._spans else -1
            if piece.policy_version < newest:
                raise SamplingError(f"policy version {piece.policy_version} after {newest} in one rollout")
            if piece.policy_version > newest:
                self._spans.append(VersionSpan(len(self.token_ids), piece.policy_version))
            self.token_ids.extend(piece.token_ids)
            self._logprobs.extend(piece.logprobs)
        self._finish_reason = piece.finish_reason

    def end_turn(self) -> list[int]:
        """Ends the turn whose last piece was added; its sampled tokens. Raises SamplingError when it has none, or was aborted."""
        sampled = self.token_ids[self._sampled_at :]
        self._require_end(sampled)
        observed = self._sampled_at - self._turn_at
        self.turns.append(Turn(observed, len(sampled), FinishReason(self._finish_reason or ""), said=self._said))
        return sampled

    def describe_turn(self, *, text: str, reward: float | None = None) -> None:
        """Completes the turn that ended last by its text and its own reward."""
        self.turns[-1] = replace(self.turns[-1], text=text, reward=reward)

    def hear(self, said: Sequence[Message]) -> None:
        """Takes what the next turn answers; of the first turn this is the prompt."""
        self._said = tuple(said)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Begins another turn with tokens that the policy does not sample."""
        self._turn_at = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self._logprobs.extend([0.0] * len(token_ids))
        self._sampled_at, self._finish_reason = len(self.token_ids), None

    def end_episode(self, reason: FinishReason, outcome: EpisodeOutcome | None = None) -> None:
        """Ends the episode after its last turn."""
        self._finish_reason, self._outcome = reason, outcome

    def build(self, text: str) -> Rollout:
        """The finished rollout. Raises SamplingError when unfinished, aborted, empty, or a log-prob is not finite."""
        self._require_end(self.token_ids)
        logprobs = np.asarray(self._logprobs, LOGPROB_DTYPE)
        if not np.isfinite(logprobs).all():
            raise SamplingError(f"log-prob of token {int(np.argmin(np.isfinite(logprobs)))} is not finite")
        return Rollout(
            np.asarray(self.token_ids, TOKEN_DTYPE).tobytes(), inference_logprobs=logprobs.tobytes(), text=text,
            finish_reason=FinishReason(self._finish_reason or ""), versions=tuple(self._spans), turns=tuple(self.turns),
            outcome=self._outcome,
        )  # fmt: skip

    def _require_end(self, token_ids: Sequence[int]) -> None:
        if self._finish_reason not in set(FinishReason):
            raise SamplingError(f"a rollout ended with {self._finish_reason!r} after {len(self.token_ids)} tokens")
        if not token_ids:
            raise SamplingError("a rollout ended without a token")
