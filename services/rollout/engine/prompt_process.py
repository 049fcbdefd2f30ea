"""Prompt process: a model's tokenizer in a child process, which is killed and replaced when it exceeds its time or memory.

encode, bridge, decode ──► batches ──► one request at a time, each with a deadline ──► child: tokenizer and chat template (`prompts`)
                                        ├── exceeded by several calls ──► each alone
                                        └── exceeded by one ──► the child is killed, the call has failed, the next one gets a new child
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from services.common.batches import Batches
from services.common.errors import ChildDied, ChildLost, ChildTimeout, ModelError, PromptError, SandboxError
from services.common.models.prompts import Bridge, Prompt
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.streams.types import Message
from services.rollout.engine.types import SamplingError

REQUEST_S = 10.0
"""Longest work on one prompt, or on one group's answers; a thousand times the usual."""
DECODE_TOKEN_S = 1e-5
"""In addition for each token of the answers: usual are 0.3 µs, which are seconds for a group of long ones on a busy machine."""
LIMITS = Limits(wall_s=120.0, memory_mib=2048)
"""Of a child; the time is that of the tokenizer's load, on a busy machine."""
_BATCH_CHARS = 1 << 18
"""Most characters of the prompts of one request."""
_BATCH_TOKENS = 1 << 16
"""Most tokens of the answers of one request."""
_TRIES = 3
"""A request fails when so many children in a row were ended from outside."""
_OPEN = "services.common.models.prompts:PromptEncoder"

_Answers = Sequence[Sequence[int]]
_Call = TypeVar("_Call")
_Value = TypeVar("_Value")


class PromptProcess:
    """One model's tokenizer.

    Requests raise PromptError (template or tokenizer refuse the input, fail, or need too much time or memory), SamplingError (no child
    process could be used) or ModelError (the tokenizer had to be loaded again, and cannot be).
    """

    def __init__(self, sandbox: Sandbox, model_dir: Path, chat_template: str | None = None) -> None:
        """Starts nothing. `chat_template`: in place of the model's own."""
        self._sandbox, self._model_dir, self._chat_template = sandbox, model_dir, chat_template
        self._turn = asyncio.Lock()
        self._child: Child | None = None
        self._encoding = Batches(partial(self._token_ids_of_all, "encode_all"), size_of=_chars_of, most=_BATCH_CHARS)
        self._bridging = Batches(partial(self._token_ids_of_all, "bridge_all"), size_of=_chars_of, most=_BATCH_CHARS)
        self._decoding = Batches(self._decode_all, size_of=_tokens_of, most=_BATCH_TOKENS)

    async def open(self) -> None:
        """Loads the tokenizer. Raises ModelError when it cannot be loaded, for whatever reason."""
        async with self._turn:
            await self._opened()

    async def encode(self, messages: Iterable[Message], *, most_chars: int) -> list[int]:
        """Token ids of the prompt, generation prompt included; `most_chars`: longest text that the template may produce."""
        values = [(message.role, message.content) for message in messages]
        return _result(await self._encoding.run((values, most_chars)))

    async def bridge(self, messages: Iterable[Message], *, last: int, most_chars: int) -> list[int]:
        """Token ids between a sampled turn, whose `last` token is known, and the next one."""
        values = [(message.role, message.content) for message in messages]
        return _result(await self._bridging.run((values, last, most_chars)))

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text, without the chat template, special tokens added as the model's texts have them."""
        return await self._request("the model's tokenizer", "encode_text", text)

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """Texts of the rollouts, without special tokens."""
        return _result(await self._decoding.run(rollouts))

    async def close(self) -> None:
        """Ends the child."""
        for batches in (self._encoding, self._bridging, self._decoding):
            await batches.close()
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _token_ids_of_all(
        self, method: str, calls: Sequence[Prompt] | Sequence[Bridge]
    ) -> list[list[int] | PromptError]:
        try:
            found = await self._request("the model's chat template, or its tokenizer,", method, calls)
        except PromptError as error:
            return await _each_alone(partial(self._token_ids_of_all, method), calls, error)
        return [PromptError(reason) if token_ids is None else token_ids for token_ids, reason in found]

    async def _decode_all(self, groups: Sequence[_Answers]) -> list[list[str] | PromptError]:
        wall_s = REQUEST_S + DECODE_TOKEN_S * sum(map(_tokens_of, groups))
        rollouts = [rollout for group in groups for rollout in group]
        try:
            texts = iter(await self._request("the model's tokenizer, decoding,", "decode", rollouts, wall_s=wall_s))
        except PromptError as error:
            return await _each_alone(self._decode_all, groups, error)
        return [list(islice(texts, len(group))) for group in groups]

    async def _request(self, subject: str, method: str, *arguments: object, wall_s: float | None = None) -> list[Any]:
        """Calls the child's method; `subject`: of the error message; `wall_s`: longest work (default: REQUEST_S)."""
        async with self._turn:  # a request that gets its child killed must not fail another one
            for tries_left in reversed(range(_TRIES)):
                child = await self._opened()
                try:
                    return cast("list[Any]", await child.request(method, *arguments, wall_s=wall_s or REQUEST_S))
                except (ChildTimeout, ChildDied) as error:
                    raise PromptError(f"{subject} {error}") from error
                except ChildLost as error:
                    if not tries_left:
                        raise SamplingError(f"the tokenizer's process was ended again and again: {error}") from error
                except SandboxError as error:
                    raise SamplingError(f"the tokenizer's process failed: {error}") from error
        raise AssertionError  # the last round returns or raises

    async def _opened(self) -> Child:
        if self._child is None or not self._child.alive:
            try:
                self._child = await self._sandbox.spawn(_OPEN, str(self._model_dir), self._chat_template, limits=LIMITS)
            except SandboxError as error:
                raise ModelError(f"{self._model_dir}: the tokenizer cannot be loaded: {error}") from error
        return self._child


async def _each_alone(
    send: Callable[[Sequence[_Call]], Awaitable[list[_Value | PromptError]]], calls: Sequence[_Call], error: PromptError
) -> list[_Value | PromptError]:
    """Finds out which of the calls caused the error: only that one has it."""
    if len(calls) == 1:
        return [error]
    return [(await send([call]))[0] for call in calls]


def _result(value: _Value | PromptError) -> _Value:
    if isinstance(value, PromptError):
        raise value
    return value


def _chars_of(call: Prompt | Bridge) -> int:
    return sum(len(content) for _, content in call[0])


def _tokens_of(answers: _Answers) -> int:
    return sum(map(len, answers))
