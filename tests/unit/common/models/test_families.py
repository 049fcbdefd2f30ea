"""Transcripts of the families Llama 3, Qwen2.5 and Qwen3, played by the rollout service itself: prompts grow by what the template writes.

A service that made ids of text again is known by these properties: five that do are tried.
"""

# ruff: noqa: ARG002  the engine's methods have the arguments that they have

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.common.environments.types import Observation
from services.common.errors import ModelError
from services.common.models.prompts import PromptEncoder
from services.common.models.transcript import Chat
from services.common.streams.types import EnvironmentCall, Message, Purpose, Task
from services.rollout.engine.engine import Engine
from services.rollout.engine.types import Piece
from services.rollout.sampling.sampler import Sampler
from tests.unit.common.models.chat_templates import ALL_THOUGHTS, MOST, OPENED, THINKER, encoder

Role = Literal["user", "tool"]
Messages = list[tuple[Role, str]]

QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe of use.<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A system prompt of its own where none is given, a line break after each turn, and one turn for tools that answer together."""
LLAMA3 = (
    "<|begin|><|start|>system<|stop|>\n\nIt is today.\n\n{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
    "<|eot|>{% for m in messages if m.role != 'system' %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|stop|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
"""A system turn always, headers with two line breaks, contents without their outer spaces, and nothing after the end of a turn."""


def after_chatml(messages: Messages) -> str:
    text, before = "<|im_end|>\n", ""
    for role, content in messages:
        if role == "user":
            text += ("<|im_end|>\n" if before == "tool" else "") + f"<|im_start|>user\n{content}<|im_end|>\n"
        else:
            text += ("" if before == "tool" else "<|im_start|>user") + f"\n<tool_response>\n{content}\n</tool_response>"
        before = role
    return text + ("<|im_end|>\n" if before == "tool" else "") + "<|im_start|>assistant\n"


def after_llama(messages: Messages) -> str:
    named = [("ipython" if role == "tool" else role, content.strip()) for role, content in messages]
    turns = "".join(f"<|start|>{role}<|stop|>\n\n{content}<|eot|>" for role, content in named)
    return f"<|eot|>{turns}<|start|>assistant<|stop|>\n\n"


def after_qwen3(messages: Messages) -> str:
    return (
        "<|im_end|>\n"
        + "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for _, content in messages)
        + "<|im_start|>assistant\n"
    )


class Family(NamedTuple):
    """A template, and what it writes from the end of an answer on, once more in Python."""

    template: str
    between: Callable[[Messages], str]
    roles: tuple[Role, ...] = ("user", "tool")

    @property
    def encoder(self) -> PromptEncoder:
        return encoder(self.template)


FAMILIES = {
    "llama3": Family(LLAMA3, after_llama),
    "qwen2.5": Family(QWEN25, after_chatml),
    "qwen3 with tools": Family(THINKER, after_qwen3, ("tool",)),
    "qwen3 that keeps its thoughts": Family(ALL_THOUGHTS, after_qwen3),
    "qwen3 that begins to think": Family(OPENED[ALL_THOUGHTS], lambda messages: after_qwen3(messages) + "<think>\n"),
}
"""Of Qwen3 only where nothing is rewritten; `test_a_history_that_is_rewritten_is_refused` has the rest."""


class Reply(NamedTuple):
    """What the policy samples in one turn, without the end of the turn, and what answers it."""

    sampled: list[int]
    ended: bool
    messages: Messages

    def ids(self, end: int) -> list[int]:
        return [*self.sampled, end] if self.ended else self.sampled


Play = Callable[[PromptEncoder, Chat, Sequence[Reply]], list[list[int]]]
"""The prompts of all turns, of which the last one is not answered any more."""


@dataclass
class Scripted:
    """An engine that samples what it is told to, with the real tokenizer and template."""

    encoder: PromptEncoder
    replies: Sequence[Reply]
    prompts: list[list[int]] = field(default_factory=list)
    max_model_len = MOST

    async def prompt_token_ids(self, messages: Sequence[Message]) -> list[int]:
        return self.encoder.encode([(message.role, message.content) for message in messages], MOST)

    async def bridge(self, messages: Sequence[Message], *, last: int) -> list[int]:
        return self.encoder.bridge([(message.role, message.content) for message in messages], last, MOST)

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        return self.encoder.decode(rollouts)

    async def generate(self, prompt_token_ids: list[int], **options: Any) -> AsyncGenerator[Piece, None]:
        turn = len(self.prompts)
        self.prompts.append(list(prompt_token_ids))
        end = self.encoder.end_of_turn
        ids = self.replies[turn].ids(end) if turn < len(self.replies) else [end]
        reason = "length" if ids[-1] != end else "stop"
        for at, token in enumerate(ids):
            yield Piece(0, [token], [-1.0], 0, reason if at == len(ids) - 1 else None)


@dataclass
class Told:
    """An environment that says what it is told to."""

    first: Chat
    replies: Sequence[Reply]
    turn: int = 0

    async def reset(self) -> Observation:
        return Observation(tuple(Message(cast("Any", role), content) for role, content in self.first))

    async def step(self, reply: str) -> Observation:
        self.turn += 1
        if self.turn > len(self.replies):
            return Observation((), done=True, reward=1.0)
        return Observation(tuple(Message(*message) for message in self.replies[self.turn - 1].messages))

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[Told]:
        yield self


def served(made: PromptEncoder, first: Chat, replies: Sequence[Reply]) -> list[list[int]]:
    """By the rollout service, whose rollout must have the very tokens that its engine was prompted with."""
    engine, turns = Scripted(made, replies), len(replies) + 1
    call = EnvironmentCall(
        "told", {}, 0, max_turns=turns, max_turn_tokens=64, max_observation_tokens=MOST, step_timeout_s=1.0
    )
    task = Task(
        job_id="job-1", lineage=1, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=(), data_source="environment:told",
        ground_truth="", extra_info={}, group_size=1, temperature=1.0, max_tokens=MOST, min_policy_version=0, timeout_s=60.0,
        environment=call,
    )  # fmt: skip
    group = asyncio.run(Sampler(cast("Engine", engine), "r0", worlds=Told(first, replies)).sample(task))
    assert group.failure is None, group.failure
    (rollout,), at = group.rollouts, 0
    assert len(rollout.turns) == turns
    for turn, prompt in zip(rollout.turns, engine.prompts, strict=True):
        at += turn.observed
        assert prompt == [*group.prompt_tokens.tolist(), *rollout.tokens[:at].tolist()]
        at += turn.sampled
    return engine.prompts


def replies_of(family: Family) -> st.SearchStrategy[list[Reply]]:
    """Any tokens but the end of a turn, some of which text would have in other pieces; one to three messages that answer."""
    made = family.encoder
    letters = [made.token_ids(letter)[0] for letter in "abc\n"]
    vocabulary = len(made._tokenizer)
    token = st.one_of(st.sampled_from(letters), st.integers(0, vocabulary - 1)).filter(
        lambda one: one != made.end_of_turn
    )
    texts = st.text(st.sampled_from("abc \n|é"), max_size=6)
    messages = st.lists(st.tuples(st.sampled_from(family.roles), texts), min_size=1, max_size=3)
    reply = st.builds(Reply, st.lists(token, min_size=1, max_size=6), st.booleans(), messages)
    return st.lists(reply, min_size=1, max_size=3)


BEGINNINGS: list[Chat] = [[("user", "go")], [("system", "bc"), ("user", "a\nb")]]


def check(play: Play, family: Family, examples: int = 60) -> None:
    """Every prompt is the one before it, the reply to the token, and what the template writes after an answer."""

    @given(first=st.sampled_from(BEGINNINGS), replies=replies_of(family))
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    def holds(first: Chat, replies: list[Reply]) -> None:
        made = family.encoder
        prompts = play(made, first, replies)
        assert prompts[0] == made.encode(first, MOST)
        assert len(prompts) == len(replies) + 1
        for reply, (before, after) in zip(replies, pairwise(prompts), strict=True):
            sampled = reply.ids(made.end_of_turn)
            assert after[: len(before)] == before, "what came before has changed"
            assert after[len(before) :][: len(sampled)] == sampled, "a sampled token has changed"
            observed = after[len(before) + len(sampled) :]
            between = made.token_ids(family.between(reply.messages))
            assert observed == (between[1:] if reply.ended else between), "the template writes something else"

    holds()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_prompts_grow_by_the_sampled_tokens_and_by_what_the_template_writes_after_an_answer(family: Family) -> None:
    check(served, family)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_written_between_turns_stands_there_in_a_whole_transcript_too(family: Family) -> None:
    @given(replies=replies_of(family), answer=st.text("xyz", min_size=1, max_size=4))
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    def holds(replies: list[Reply], answer: str) -> None:
        chat: list[tuple[str, str]] = [("user", "go")]
        for reply in replies:
            chat += [("assistant", answer), *reply.messages]
        whole = family.encoder.encode(chat, MOST)
        between = family.encoder.token_ids(family.between(replies[-1].messages))
        assert whole[-len(between) :] == between

    holds()


def retokenised(made: PromptEncoder, first: Chat, replies: Sequence[Reply]) -> list[list[int]]:
    """Renders and tokenizes the whole conversation before each turn."""
    chat, prompts = list(first), [made.encode(first, MOST)]
    for reply in replies:
        chat += [("assistant", made.decode([reply.sampled])[0]), *reply.messages]
        prompts.append(made.encode(chat, MOST))
    return prompts


def appended(
    made: PromptEncoder, first: Chat, replies: Sequence[Reply], turn: Callable[[Reply], list[int]]
) -> list[list[int]]:
    prompts = [made.encode(first, MOST)]
    for reply in replies:
        prompts.append(prompts[-1] + turn(reply))
    return prompts


def with_replies_retokenised(made: PromptEncoder, first: Chat, replies: Sequence[Reply]) -> list[list[int]]:
    """Keeps the prompts, and tokenizes each reply's text."""

    def turn(reply: Reply) -> list[int]:
        ids = reply.ids(made.end_of_turn)
        return made.token_ids(made.decode_raw([ids])[0]) + made.bridge(reply.messages, ids[-1], MOST)

    return appended(made, first, replies, turn)


def with_bridges_in_parts(made: PromptEncoder, first: Chat, replies: Sequence[Reply]) -> list[list[int]]:
    """Keeps what was sampled, and tokenizes the text of a bridge character by character."""

    def turn(reply: Reply) -> list[int]:
        ids = reply.ids(made.end_of_turn)
        text = made.decode_raw([made.bridge(reply.messages, ids[-1], MOST)])[0]
        parts = re.findall(r"<\|\w+\|>|.", text, re.DOTALL)
        return ids + [token for part in parts for token in made.token_ids(part)]

    return appended(made, first, replies, turn)


def with_every_turn_ended(made: PromptEncoder, first: Chat, replies: Sequence[Reply]) -> list[list[int]]:
    """Writes the end of a turn also where it was sampled."""
    other = (made.end_of_turn + 1) % len(made._tokenizer)
    return appended(
        made, first, replies, lambda reply: reply.ids(made.end_of_turn) + made.bridge(reply.messages, other, MOST)
    )


def with_no_turn_ended(made: PromptEncoder, first: Chat, replies: Sequence[Reply]) -> list[list[int]]:
    """Never writes it, also where the policy was cut."""
    end = made.end_of_turn
    return appended(made, first, replies, lambda reply: reply.ids(end) + made.bridge(reply.messages, end, MOST))


MUTANTS = [
    retokenised, with_replies_retokenised, with_bridges_in_parts, with_every_turn_ended, with_no_turn_ended
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_service_that_makes_ids_of_text_again_is_found_out(family: Family, mutant: Play) -> None:
    with pytest.raises(AssertionError, match=r"has changed|something else"):
        check(mutant, family)


REWRITES = {"qwen3": THINKER, "qwen3 that begins to think": OPENED[THINKER]}
DIFFERS = re.compile(r"after turn (\d+) token (\d+) is that of '(.*?)' in place of '(.*?)' \(")


@pytest.mark.parametrize("template", REWRITES.values(), ids=REWRITES)
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "/models/own"])
def test_a_history_that_is_rewritten_is_refused_with_the_model_and_the_first_token_that_differs(
    template: str, name: str
) -> None:
    made = encoder(template)
    with pytest.raises(ModelError, match=rf"^{re.escape(name)}: its chat template rewrites earlier turns") as refused:
        made.check_append_only(name, ("user", "tool"))
    found = DIFFERS.search(str(refused.value))
    assert found is not None, str(refused.value)
    turn, token = int(found[1]), int(found[2])

    chat: list[tuple[str, str]] = [("user", "Begin.")]
    opened = template in OPENED.values()  # there even a reply without a thought is rewritten
    for number in range(1, turn + 1):
        before = made.render(chat, MOST)
        role = ("user", "tool")[number % 2]
        thought = "" if opened else f"<think>\nThought {number}.\n</think>\n\n"
        reply = f"{thought}Answer {number}."
        chat += [("assistant", reply), (role, f"Observed {number}.")]
    after = made.render(chat, MOST)
    kept, rewritten = made.token_ids(before + reply), made.token_ids(after)
    assert token == next(at for at, pair in enumerate(zip(kept, rewritten, strict=False)) if len(set(pair)) > 1)
    old, new = (made.decode_raw([ids[token : token + 8]])[0] for ids in (kept, rewritten))
    assert (found[3], found[4]) == tuple(repr(text)[1:-1] for text in (new, old))
