"""Deadlines of a group: who is whole when they pass goes on, the others are aborted; the engine is scripted."""

# ruff: noqa: ARG002  the engine's methods have the arguments that they have

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import cast

import pytest

from services.common.streams.types import Message, Purpose, Task
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import Piece
from services.rollout.sampling.sampler import Sampler

TASK = Task(
    job_id="job-1", lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(Message("user", "2 + 3 ="),),
    data_source="test", ground_truth="5", extra_info={}, group_size=4, temperature=1.0, max_tokens=4,
    min_policy_version=0, timeout_s=20.0,
)  # fmt: skip
NEVER = 60.0


class Scripted:
    """Samples one token of rollout i after `delays[i]` seconds, and its end with it."""

    max_model_len = 64

    def __init__(self, *delays: float) -> None:
        self._delays = sorted(enumerate(delays), key=lambda item: item[1])
        self.aborted: list[int] = []

    async def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        return [1, 2]

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        return [str(list(tokens)) for tokens in rollouts]

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        left = dict(self._delays)
        for index in left:
            yield Piece(index, [7], [-0.5], 3, None)
        began = asyncio.get_running_loop().time()
        try:
            for index, delay in self._delays:
                await asyncio.sleep(began + delay - asyncio.get_running_loop().time())
                del left[index]
                yield Piece(index, [10 + index], [-0.5], 3, "stop")
        finally:
            self.aborted = list(left)


def sampler(engine: Scripted) -> Sampler:
    return Sampler(cast("Engine", engine), "r0")


def task(**changes: object) -> Task:
    return dataclasses.replace(TASK, **changes)  # type: ignore[arg-type]


async def test_a_group_closes_with_what_is_whole_at_the_deadline_when_that_is_enough() -> None:
    engine = Scripted(0.0, NEVER, 0.0, 0.0)
    group = await sampler(engine).sample(task(rollout_timeout_s=0.2, min_group_size=2))
    assert group.failure is None
    assert [rollout.tokens.tolist() for rollout in group.rollouts] == [[7, 10], [7, 12], [7, 13]]
    assert [rollout.text for rollout in group.rollouts] == ["[7, 10]", "[7, 12]", "[7, 13]"]
    assert engine.aborted == [1]
    assert group.generate_s < 5.0


@pytest.mark.parametrize(("needed", "said"), [(3, "the group needs 3"), (None, "the group needs 4")])
async def test_a_group_with_too_few_whole_rollouts_fails_this_attempt(needed: int | None, said: str) -> None:
    engine = Scripted(0.0, NEVER, NEVER, 0.0)
    group = await sampler(engine).sample(task(rollout_timeout_s=0.2, min_group_size=needed))
    assert group.failure == f"2 of 4 rollouts were sampled within 0.2 s; {said}"
    assert group.rollouts == ()
    assert not group.permanent, "another attempt may be quicker"
    assert engine.aborted == [1, 2]


async def test_no_deadline_cuts_a_group_that_is_whole_in_time() -> None:
    group = await sampler(Scripted(0.0, 0.1, 0.2, 0.0)).sample(task(rollout_timeout_s=5.0, min_group_size=2))
    assert len(group.rollouts) == 4


async def test_the_groups_deadline_holds_where_rollouts_have_none() -> None:
    group = await sampler(Scripted(0.0, NEVER, 0.0, 0.0)).sample(task(timeout_s=0.2, min_group_size=3))
    assert len(group.rollouts) == 3


async def test_a_prompt_that_cannot_be_used_fails_for_good() -> None:
    group = await sampler(Scripted(0.0)).sample(task(max_tokens=100))
    assert group.permanent
    assert group.failure == "the prompt is too long: 2 tokens and max_tokens 100 exceed the model's 64"


class Counting(Scripted):
    """Also counts prompts encoded, and groups being generated."""

    def __init__(self) -> None:
        super().__init__(0.05, 0.05, 0.05, 0.05)
        self.encoded = self.generating = self.most = 0

    async def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        self.encoded += 1
        return [1, 2]

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        self.generating += 1
        self.most = max(self.most, self.generating)
        try:
            async for piece in super().generate(
                prompt_token_ids, count=count, temperature=temperature, max_tokens=max_tokens
            ):
                yield piece
        finally:
            self.generating -= 1


async def test_the_engine_has_so_many_groups_at_most_and_others_are_prepared_meanwhile() -> None:
    engine = Counting()
    limited = Sampler(cast("Engine", engine), "r0", places=2)
    loop = asyncio.get_running_loop()
    began = loop.time()
    sampling = [asyncio.create_task(limited.sample(task())) for _ in range(5)]
    await asyncio.sleep(0.02)
    assert (engine.encoded, engine.generating) == (5, 2)
    groups = await asyncio.gather(*sampling)
    assert engine.most == 2
    assert groups[-1].generate_s < 0.6 * (loop.time() - began), "the wait for a place is no sampling"
