"""Episodes: rollouts that take turns with an environment, token in, token out. No sampled token is ever tokenized again.

    reset ─► first messages ─► prompt ─► the first turns of all, one request ─┬─► step ─┬─► done
                                                        ▲                     │         │
                                     a request of its own ◄── observed tokens ◄── messages

The environments of one group begin alike, as its rollouts are compared; then each rollout goes its own way. A rollout whose environment
fails is not whole: it has no reward, and the group goes on with the others where it may.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Self

from services.common.environments.types import EnvironmentFailed, Observation, Reason, World
from services.common.errors import PromptError
from services.common.streams.types import EnvironmentCall, EpisodeOutcome, FinishReason, Task
from services.rollout import metrics
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import Piece
from services.rollout.sampling.builder import RolloutBuilder
from services.rollout.sampling.openings import Openings, answer_of

_IN_ENGINE = metrics.EPISODE_SECONDS.labels(spent="engine")
for _reason in Reason:
    metrics.EPISODE_FAILURES.labels(reason=_reason)  # a counter that begins at 1 has no increase


@dataclass(slots=True)
class Episode:
    """One rollout and its environment."""

    world: World
    builder: RolloutBuilder = field(default_factory=RolloutBuilder)
    ended: bool = False
    """Whether it came to its end: a turn alone may end before."""


class Episodes:
    """The episodes of one task's group, as long as the context; `completions.Completions` describes the methods."""

    def __init__(self, engine: Engine, openings: Openings, task: Task, call: EnvironmentCall) -> None:
        self._engine, self._openings, self._task, self._call = engine, openings, task, call
        self._shared = uuid.uuid4().hex
        """By which the turns of the group reuse each other's cached keys and values."""
        self._open = AsyncExitStack()
        self._prompt: list[int] = []
        self._episodes: list[Episode] = []
        self.failure = ""

    async def __aenter__(self) -> Self:
        """Opens nothing yet."""
        await self._open.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends them."""
        await self._open.aclose()

    async def begin(self) -> list[int]:
        """Resets the environments, whose first messages are the prompt.

        Raises:
            EnvironmentFailed: one did not begin.
            PromptError: they do not begin alike, are over at once, or the prompt has no room in the context.
        """
        try:
            begun = await self._open.enter_async_context(self._openings.open(self._task))
        except EnvironmentFailed as failure:
            _count(failure)
            raise
        first, *others = (observation for _, observation in begun)
        if any(other != first for other in others):
            raise PromptError(f"environment {self._call.name} does not begin alike with the same config and seed")
        if first.done:
            raise PromptError(f"environment {self._call.name} is over before the first turn")
        self._episodes = [Episode(world) for world, _ in begun]
        for episode in self._episodes:
            episode.builder.hear(first.messages)
        self._prompt = await self._engine.prompt_token_ids(first.messages)
        if self._room(len(self._prompt)) < 1:
            raise PromptError(
                f"the prompt is too long: {len(self._prompt)} tokens leave no room in the model's {self._engine.max_model_len}"
            )
        return self._prompt

    async def sample(self) -> None:
        """Plays all of them to their ends."""
        first_turns = self._sample(self._prompt, len(self._episodes))
        try:
            async with asyncio.TaskGroup() as later_turns, aclosing(first_turns) as pieces:
                async for piece in pieces:
                    episode = self._episodes[piece.index]
                    episode.builder.add(piece)
                    if episode.builder.finished:
                        later_turns.create_task(self._go_on(episode))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    @property
    def whole(self) -> list[RolloutBuilder]:
        """Those that came to their end."""
        return [episode.builder for episode in self._episodes if episode.ended]

    async def _go_on(self, episode: Episode) -> None:
        """From the end of a turn to that of the episode."""
        builder = episode.builder
        try:
            while (observed := await self._answer(episode)) is not None:
                builder.observe(observed)
                async with aclosing(self._sample([*self._prompt, *builder.token_ids], 1)) as pieces:
                    async for piece in pieces:
                        builder.add(piece)
        except EnvironmentFailed as failure:
            self.failure = self.failure or str(failure)
            _count(failure)
        else:
            episode.ended = True
            metrics.EPISODES.labels(outcome="whole").inc()
            metrics.TURNS.observe(len(builder.turns))

    async def _answer(self, episode: Episode) -> list[int] | None:
        """The environment's answer to the turn that ended, as tokens that the next turn begins with; None at the end of the episode."""
        builder, call = episode.builder, self._call
        sampled = builder.end_turn()
        (reply,) = await self._engine.decode([sampled])
        observation = await answer_of(episode.world.step(reply))
        builder.describe_turn(text=reply, reward=None if observation.done else observation.reward)
        if observation.done:
            builder.end_episode(FinishReason.STOP, self._outcome(observation))
            return None
        if len(builder.turns) >= call.max_turns:
            builder.end_episode(FinishReason.TURNS)
            return None
        observed = await self._engine.bridge(observation.messages, last=sampled[-1])
        if len(observed) > call.max_observation_tokens:
            said = f"environment {call.name} said {len(observed)} tokens at once"
            limit = f"max_observation_tokens is {call.max_observation_tokens}"
            raise EnvironmentFailed(f"{said}, and {limit}", reason=Reason.BAD_OBSERVATION)
        if self._room(len(self._prompt) + len(builder.token_ids) + len(observed)) < 1:
            builder.end_episode(FinishReason.CONTEXT)
            return None
        builder.hear(observation.messages)
        return observed

    def _outcome(self, observation: Observation) -> EpisodeOutcome:
        if observation.reward is None:
            ended = f"environment {self._call.name} ended without a reward"
            raise EnvironmentFailed(ended, reason=Reason.BAD_OBSERVATION)
        accuracy = float(observation.reward > 0.0) if observation.accuracy is None else observation.accuracy
        return EpisodeOutcome(observation.reward, accuracy, observation.detail)

    def _room(self, length: int) -> int:
        """Tokens of the next turn at most, after so many."""
        left_of_task = len(self._prompt) + self._task.max_tokens - length
        return min(self._call.max_turn_tokens, left_of_task, self._engine.max_model_len - length)

    async def _sample(self, token_ids: list[int], count: int) -> AsyncGenerator[Piece, None]:
        began = time.monotonic()
        stream = self._engine.generate(
            token_ids,
            count=count,
            temperature=self._task.temperature,
            max_tokens=self._room(len(token_ids)),
            shared=self._shared,
        )
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                metrics.TOKENS.inc(len(piece.token_ids))
                if piece.finish_reason is not None:
                    _IN_ENGINE.inc(time.monotonic() - began)
                yield piece


def _count(failure: EnvironmentFailed) -> None:
    metrics.EPISODES.labels(outcome="failed").inc()
    metrics.EPISODE_FAILURES.labels(reason=failure.reason).inc()
