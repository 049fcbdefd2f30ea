"""Episodes: what the policy sampled is kept to the token, what it observed is told apart, and a failed environment is no reward."""

# ruff: noqa: ARG002  the engine's methods have the arguments that they have

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from services.common.environments.types import EnvironmentFailed, Observation
from services.common.streams.types import (
    EnvironmentCall,
    EpisodeOutcome,
    FinishReason,
    Message,
    Purpose,
    RolloutGroup,
    Task,
)
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import Piece
from services.rollout.sampling.sampler import Sampler

CALL = EnvironmentCall(
    "count", {"to": 3}, seed=5, max_turns=4, max_turn_tokens=3, max_observation_tokens=8, step_timeout_s=1.0
)
TASK = Task(
    job_id="job-1", lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source="environment:count",
    ground_truth="", extra_info={}, group_size=2, temperature=1.0, max_tokens=40, min_policy_version=0, timeout_s=20.0,
    environment=CALL,
)  # fmt: skip
NEVER = 60.0
PROMPT = [1, 2, 3]
END = 9


class Scripted:
    """Samples two tokens and the end in each turn; the second token counts up with every request. A bridge is 50 and the texts' lengths."""

    max_model_len = 64

    def __init__(self, versions: Iterable[int] = (0,) * 99, delays: Iterable[float] = (0.0,) * 99) -> None:
        self.asked: list[tuple[list[int], int, int, str | None]] = []
        self.bridged: list[tuple[list[str], int]] = []
        self._versions, self._delays = iter(versions), iter(delays)
        self.reason, self.last = "stop", END

    async def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        return list(PROMPT)

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        return [" ".join(str(token) for token in tokens if token != END) for tokens in rollouts]

    async def bridge(self, messages: Sequence[Message], *, last: int) -> list[int]:
        self.bridged.append(([message.content for message in messages], last))
        return [50 + len(message.content) for message in messages]

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int, shared: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        self.asked.append((list(prompt_token_ids), count, max_tokens, shared))
        number, version = len(self.asked), next(self._versions)
        await asyncio.sleep(next(self._delays))
        for index in range(count):
            yield Piece(index, [20 + index], [-0.5], version, None)
            yield Piece(index, [100 + number, self.last], [-1.0, -0.25], version, self.reason)


@dataclass
class Counting:
    """Ends after so many replies, with their number as the reward; keeps the replies."""

    ends_after: int
    replies: list[str]
    fail: Callable[[int], Any] = lambda _: None

    async def reset(self) -> Observation:
        return Observation((Message("user", "go"),))

    async def step(self, reply: str) -> Observation:
        self.replies.append(reply)
        turn = len(self.replies)
        if (failed := self.fail(turn)) is not None:
            await failed if asyncio.iscoroutine(failed) else None
            raise EnvironmentFailed("environment count died")
        if turn == self.ends_after:
            return Observation((), done=True, reward=float(turn), accuracy=0.5, detail="counted")
        return Observation((Message("tool", "x" * turn),), reward=0.25 * turn)


class Opened:
    """Worlds that are opened one after the other, and told when they close."""

    def __init__(self, *worlds: Any) -> None:
        self._worlds = list(worlds)
        self.closed = 0

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[Any]:
        try:
            yield self._worlds.pop(0)
        finally:
            self.closed += 1


async def sample(engine: Scripted, worlds: Opened, **changes: Any) -> RolloutGroup:
    call = replace(CALL, **{name: changes.pop(name) for name in list(changes) if hasattr(CALL, name)})
    task = replace(TASK, environment=call, **changes)
    return await Sampler(cast("Engine", engine), "r0", worlds=worlds).sample(task)


async def test_every_turn_is_prompted_with_the_very_tokens_before_it() -> None:
    engine, worlds = Scripted(), Opened(Counting(3, []), Counting(1, []))
    group = await sample(engine, worlds)
    long, short = group.rollouts
    assert short.tokens.tolist() == [21, 101, END]
    assert long.tokens.tolist() == [20, 101, END, 51, 20, 102, END, 52, 20, 103, END]
    prompts = [prompt for prompt, *_ in engine.asked]
    assert prompts == [PROMPT, [*PROMPT, *long.tokens[:4]], [*PROMPT, *long.tokens[:8]]]
    assert [count for _, count, *_ in engine.asked] == [2, 1, 1]
    assert len({shared for *_, shared in engine.asked}) == 1, "turns of a group reuse each other's cached keys"
    assert group.prompt_tokens.tolist() == PROMPT
    assert worlds.closed == 2


async def test_turns_tell_observed_tokens_from_sampled_ones_which_alone_have_logprobs() -> None:
    group = await sample(Scripted(), Opened(Counting(3, []), Counting(1, [])))
    long, short = group.rollouts
    assert [(turn.observed, turn.sampled, turn.reward) for turn in long.turns] == [
        (0, 3, 0.25),
        (1, 3, 0.5),
        (1, 3, None),
    ]
    assert [(turn.observed, turn.sampled, turn.reward) for turn in short.turns] == [(0, 3, None)]
    assert {turn.finish_reason for turn in long.turns} == {FinishReason.STOP}
    assert long.logprobs.tolist() == [-0.5, -1.0, -0.25, 0.0, -0.5, -1.0, -0.25, 0.0, -0.5, -1.0, -0.25]
    assert [bool(value) for value in long.logprobs] == long.sampled.tolist()
    assert long.outcome == EpisodeOutcome(3.0, 0.5, "counted")
    assert long.finish_reason is FinishReason.STOP


async def test_a_turn_has_what_the_environment_said_before_it_and_the_policys_reply() -> None:
    group = await sample(Scripted(), Opened(Counting(3, []), Counting(1, [])))
    heard = [([message.content for message in turn.said], turn.text) for turn in group.rollouts[0].turns]
    assert heard == [(["go"], "20 101"), (["x"], "20 102"), (["xx"], "20 103")]


async def test_each_environment_is_told_what_its_own_rollout_said() -> None:
    first, second = Counting(3, []), Counting(1, [])
    await sample(Scripted(), Opened(first, second))
    assert first.replies == ["20 101", "20 102", "20 103"]
    assert second.replies == ["21 101"]


async def test_tokens_are_stamped_with_the_version_that_sampled_them_and_observed_ones_with_that_before() -> None:
    group = await sample(Scripted(versions=(4, 4, 6)), Opened(Counting(3, []), Counting(1, [])))
    assert group.rollouts[0].token_versions.tolist() == [4] * 8 + [6] * 3


async def test_an_episode_that_goes_on_after_the_last_turn_ends_there_without_an_outcome() -> None:
    group = await sample(Scripted(), Opened(Counting(99, []), Counting(1, [])), max_turns=2)
    long, short = group.rollouts
    assert (long.finish_reason, long.outcome, len(long.turns)) == (FinishReason.TURNS, None, 2)
    assert short.outcome is not None
    assert long.sampled[-1], "nothing is observed that the policy does not answer"


@pytest.mark.parametrize("limit", [{"max_tokens": 8}, {"max_tokens": 7}])
async def test_an_episode_without_room_for_another_turn_ends_with_a_sampled_token(limit: dict[str, int]) -> None:
    engine = Scripted()
    group = await sample(engine, Opened(Counting(99, []), Counting(1, [])), **limit)
    long, _ = group.rollouts
    assert (long.finish_reason, long.outcome) == (FinishReason.CONTEXT, None)
    assert long.sampled[-1]
    assert len(long.tokens) <= limit["max_tokens"]


async def test_no_turn_may_take_more_than_what_the_task_and_the_context_leave() -> None:
    engine = Scripted()
    await sample(engine, Opened(Counting(99, []), Counting(1, [])), max_turn_tokens=30, max_tokens=40)
    assert [most for *_, most, _ in engine.asked][:3] == [30, 30, 30]
    engine = Scripted()
    await sample(engine, Opened(Counting(99, []), Counting(1, [])), max_turn_tokens=30, max_tokens=32)
    assert [most for *_, most, _ in engine.asked][:3] == [30, 32 - 4, 32 - 8]


@pytest.mark.parametrize(("reason", "last"), [("length", 7), ("stop", 8), ("stop", END)])
async def test_a_bridge_follows_the_last_token_that_was_sampled_whatever_ended_the_turn(reason: str, last: int) -> None:
    engine = Scripted()
    engine.reason, engine.last = reason, last
    group = await sample(engine, Opened(Counting(2, []), Counting(1, [])))
    assert engine.bridged == [(["x"], last)]
    assert group.rollouts[0].turns[0].finish_reason == reason


async def test_a_failed_environment_leaves_its_rollout_out_and_never_gives_a_reward() -> None:
    worlds = Opened(Counting(3, [], fail=lambda turn: turn == 2 or None), Counting(1, []))
    group = await sample(Scripted(), worlds, min_group_size=1)
    (whole,) = group.rollouts
    assert whole.tokens.tolist() == [21, 101, END]
    worlds = Opened(Counting(3, [], fail=lambda turn: turn == 2 or None), Counting(1, []))
    group = await sample(Scripted(), worlds)
    assert group.rollouts == ()
    assert group.failure == "1 of 2 rollouts were sampled; the group needs 2; environment count died"
    assert not group.permanent
    assert worlds.closed == 2


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"millrace_rollout_{name}_total", labels) or 0.0


async def test_waits_and_failures_of_episodes_are_counted() -> None:
    async def slow() -> None:
        await asyncio.sleep(0.2)

    before = {spent: counted("episode_seconds", spent=spent) for spent in ("environment", "engine")}
    failed = counted("episode_failures", reason="error")
    late = Counting(3, [], fail=lambda turn: slow() if turn == 2 else None)
    await sample(Scripted(delays=(0.1, 0.3)), Opened(late, Counting(1, [])), min_group_size=1)
    spent = {name: counted("episode_seconds", spent=name) - value for name, value in before.items()}
    assert 0.15 <= spent["environment"] < 1.0
    assert 0.45 <= spent["engine"] < 1.5, "two first turns, and a second one"
    assert counted("episode_failures", reason="error") - failed == 1


async def test_at_the_deadline_a_rollout_whose_turn_ended_but_not_its_episode_is_not_whole() -> None:
    hang = Counting(3, [], fail=lambda _: asyncio.sleep(NEVER))
    worlds = Opened(hang, Counting(1, []))
    group = await sample(Scripted(), worlds, rollout_timeout_s=0.2, min_group_size=1)
    assert [rollout.tokens.tolist() for rollout in group.rollouts] == [[21, 101, END]]
    assert worlds.closed == 2


async def test_environments_that_begin_differently_fail_the_group_for_good() -> None:
    @dataclass
    class Other(Counting):
        async def reset(self) -> Observation:
            return Observation((Message("user", "come"),))

    group = await sample(Scripted(), Opened(Counting(1, []), Other(1, [])))
    assert group.permanent
    assert group.failure == "environment count does not begin alike with the same config and seed"


async def test_an_observation_beyond_its_limit_is_a_failure_of_the_environment() -> None:
    group = await sample(Scripted(), Opened(Counting(3, []), Counting(1, [])), max_observation_tokens=0)
    assert group.failure is not None
    assert "environment count said 1 tokens at once, and max_observation_tokens is 0" in group.failure


async def test_a_server_without_environments_says_so() -> None:
    group = await Sampler(cast("Engine", Scripted()), "r0").sample(TASK)
    assert group.failure == "this server has no environments, and the task is of count"
