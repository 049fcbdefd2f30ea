"""Sampler: from a task to its group, `group_size` rollouts at once, within the task's time. A failure is data, not a crash.

All rollouts of a group begin together, so that one deadline holds for each of them. At the deadline the finished rollouts are the group if
they are enough (`min_group_size`); the others are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np

from services.common.errors import PromptError
from services.common.streams.types import (
    LOGPROB_DTYPE,
    TOKEN_DTYPE,
    FinishReason,
    Rollout,
    RolloutGroup,
    Task,
    VersionSpan,
)
from services.rollout import metrics
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import Piece, SamplingError

_MANY = 1 << 30


class Sampler:
    """Samples groups, any number at once, of which the engine has at most `places`; the others are encoded, or decoded, meanwhile."""

    def __init__(self, engine: Engine, server: str, places: int = _MANY) -> None:
        """`server`: this rollout server's name, for the groups."""
        self._engine, self._server, self._places = engine, server, asyncio.Semaphore(places)

    async def sample(self, task: Task) -> RolloutGroup:
        """The task's group; with `failure` and no rollouts when it could not be sampled in time, or at all."""
        started = time.monotonic()
        prompt: list[int] = []
        try:
            prompt = await self._encode(task)
            async with self._places:
                started = time.monotonic()
                builders = await self._generate(task, prompt)
                seconds = time.monotonic() - started
            rollouts = await self._decode(builders)
        except (PromptError, SamplingError) as error:
            seconds, permanent = time.monotonic() - started, isinstance(error, PromptError)
            return self.failed(task, str(error), seconds, prompt, permanent=permanent)
        metrics.GENERATE_SECONDS.observe(seconds)
        return RolloutGroup(task, self._server, _bytes_of(prompt), tuple(rollouts), seconds)

    def failed(
        self, task: Task, failure: str, seconds: float = 0.0, prompt: Sequence[int] = (), *, permanent: bool = False
    ) -> RolloutGroup:
        """A group without rollouts, with the reason, after so many seconds. `permanent`: a retry would fail too."""
        return RolloutGroup(task, self._server, _bytes_of(prompt), (), seconds, failure, permanent)

    async def _encode(self, task: Task) -> list[int]:
        if task.group_size < 1 or task.max_tokens < 1:
            raise PromptError(f"nothing to sample: group_size {task.group_size}, max_tokens {task.max_tokens}")
        prompt = await self._engine.prompt_token_ids(task.prompt)
        longest = self._engine.max_model_len
        if len(prompt) + task.max_tokens > longest:
            raise PromptError(
                f"the prompt is too long: {len(prompt)} tokens and max_tokens {task.max_tokens} exceed the model's {longest}"
            )
        return prompt

    async def _generate(self, task: Task, prompt: list[int]) -> list[RolloutBuilder]:
        builders = [RolloutBuilder() for _ in range(task.group_size)]
        stream = self._engine.generate(
            prompt, count=task.group_size, temperature=task.temperature, max_tokens=task.max_tokens
        )
        limit_s = task.timeout_s if task.rollout_timeout_s is None else min(task.timeout_s, task.rollout_timeout_s)
        try:
            async with asyncio.timeout(limit_s), aclosing(stream) as pieces:
                async for piece in pieces:
                    builders[piece.index].add(piece)
                    metrics.TOKENS.inc(len(piece.token_ids))
        except TimeoutError:
            builders = _finished(builders, task, limit_s)
        return builders

    async def _decode(self, builders: Sequence[RolloutBuilder]) -> list[Rollout]:
        texts = await self._engine.decode([builder.token_ids for builder in builders])
        rollouts = [builder.build(text) for builder, text in zip(builders, texts, strict=True)]
        metrics.ROLLOUTS.inc(len(rollouts))
        return rollouts


def _finished(builders: list[RolloutBuilder], task: Task, limit_s: float) -> list[RolloutBuilder]:
    """The rollouts that are finished at the deadline; raises SamplingError if they are too few for a group."""
    done = [builder for builder in builders if builder.finished]
    needed = task.group_size if task.min_group_size is None else task.min_group_size
    if len(done) < needed:
        raise SamplingError(
            f"{len(done)} of {task.group_size} rollouts were sampled within {limit_s:g} s; the group needs {needed}"
        )
    return done


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, TOKEN_DTYPE).tobytes()


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
        """The finished rollout. Raises SamplingError when unfinished, aborted, empty, or a log-prob is not finite."""
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
