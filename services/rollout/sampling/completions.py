"""Completions: the rollouts of a task with a prompt, each sampled at once to its end."""

from __future__ import annotations

from contextlib import aclosing
from typing import Protocol, Self

from services.common.errors import PromptError
from services.common.streams.types import Task
from services.rollout import metrics
from services.rollout.engine.engine import Engine
from services.rollout.sampling.builder import RolloutBuilder


class Rollouts(Protocol):
    """The rollouts of one task's group, as long as the context."""

    failure: str
    """Why one of them is not whole, if the deadline is not the reason."""

    async def __aenter__(self) -> Self:
        """Opens what they need."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        ...

    async def begin(self) -> list[int]:
        """The prompt's token ids. Raises PromptError when nothing can be sampled from it."""
        ...

    async def sample(self) -> None:
        """Samples all; after a cancellation some may be whole."""
        ...

    @property
    def whole(self) -> list[RolloutBuilder]:
        """Those that are sampled to their end."""
        ...


class Completions:
    """Completions of the task's prompt; `Rollouts` describes the methods."""

    failure = ""

    def __init__(self, engine: Engine, task: Task) -> None:
        self._engine, self._task = engine, task
        self._prompt: list[int] = []
        self._builders = [RolloutBuilder() for _ in range(task.group_size)]

    async def __aenter__(self) -> Self:
        """Needs nothing."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Has nothing to close."""

    async def begin(self) -> list[int]:
        """Encodes the prompt, which needs room for a whole completion."""
        task, longest = self._task, self._engine.max_model_len
        self._prompt = await self._engine.prompt_token_ids(task.prompt)
        if len(self._prompt) + task.max_tokens > longest:
            raise PromptError(
                f"the prompt is too long: {len(self._prompt)} tokens and max_tokens {task.max_tokens} exceed the model's {longest}"
            )
        return self._prompt

    async def sample(self) -> None:
        """One request of the engine."""
        task = self._task
        stream = self._engine.generate(
            self._prompt, count=task.group_size, temperature=task.temperature, max_tokens=task.max_tokens
        )
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                self._builders[piece.index].add(piece)
                metrics.TOKENS.inc(len(piece.token_ids))

    @property
    def whole(self) -> list[RolloutBuilder]:
        """Those with their last piece."""
        return [builder for builder in self._builders if builder.finished]
