"""Builder of rollouts from streamed pieces: it records the version that sampled each token. Pure, without an engine."""

from __future__ import annotations

import numpy as np

from services.common.streams.types import LOGPROB_DTYPE, TOKEN_DTYPE, FinishReason, Rollout, VersionSpan
from services.rollout.engine.types import Piece, SamplingError


class RolloutBuilder:
    """One rollout, built piece by piece."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._finish_reason: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the last piece was added."""
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

    def build(self, text: str) -> Rollout:
        """The finished rollout.

        Raises:
            SamplingError: it is not finished, was aborted, is empty, or has a log-prob that is not finite.
        """
        if self._finish_reason not in set(FinishReason):
            raise SamplingError(f"a rollout ended with {self._finish_reason!r} after {len(self.token_ids)} tokens")
        if not self.token_ids:
            raise SamplingError("a rollout ended without a token")
        logprobs = np.asarray(self._logprobs, LOGPROB_DTYPE)
        if not np.isfinite(logprobs).all():
            raise SamplingError(f"log-prob of token {int(np.argmin(np.isfinite(logprobs)))} is not finite")
        return Rollout(
            np.asarray(self.token_ids, TOKEN_DTYPE).tobytes(), inference_logprobs=logprobs.tobytes(), text=text,
            finish_reason=FinishReason(self._finish_reason), versions=tuple(self._spans),
        )  # fmt: skip
