"""A model's tokenizer in a child process: killed when it takes too long or too much, and replaced.

encode, decode ──► one request at a time, each with a deadline ──► child: tokenizer and chat template (`services.rollout.engine.prompts`)
                            └── passed ──► the child is killed: the prompt has failed, and the next request has a new child
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import ChildDied, ChildLost, ChildTimeout, ModelError, PromptError, SandboxError
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.streams.types import Message
from services.rollout.engine.types import SamplingError

LOAD_S = 120.0
"""Longest load of a tokenizer, on a busy machine."""
REQUEST_S = 10.0
"""Longest work on one prompt, or on one group's answers; a thousand times what it takes."""
LIMITS = Limits(wall_s=LOAD_S, memory_mib=2048)
TRIES = 3
"""Children that are ended from outside before a request is given up."""
_OPEN = "services.rollout.engine.prompts:open_encoder"


class PromptProcess:
    """One model's tokenizer."""

    def __init__(self, sandbox: Sandbox, model_dir: Path) -> None:
        """Starts nothing yet."""
        self._sandbox, self._model_dir = sandbox, model_dir
        self._turn = asyncio.Lock()
        self._child: Child | None = None

    async def open(self) -> None:
        """Loads the tokenizer.

        Raises:
            ModelError: it cannot be loaded, whatever the reason.
        """
        async with self._turn:
            await self._opened()

    async def encode(self, messages: Iterable[Message], *, most_chars: int) -> list[int]:
        """Token ids of the prompt, up to where the assistant begins to speak; `most_chars`: longest text that the template may make.

        Raises:
            PromptError: template or tokenizer refuse it, fail at it, or take too long or too much for it.
            SamplingError: there is no child process to be had.
            ModelError: the tokenizer, which had to be loaded again, cannot be.
        """
        values = [[message.role, message.content] for message in messages]
        token_ids: list[int] = await self._ask(
            "the model's chat template, or its tokenizer,", "encode", values, most_chars
        )
        return token_ids

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that is continued as it stands, begun as the model's texts begin.

        Raises:
            PromptError, SamplingError, ModelError: as `encode`.
        """
        token_ids: list[int] = await self._ask("the model's tokenizer", "encode_text", text)
        return token_ids

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """The rollouts' texts, special tokens left out.

        Raises:
            PromptError, SamplingError, ModelError: as `encode`.
        """
        texts: list[str] = await self._ask("the model's tokenizer, decoding,", "decode", rollouts)
        return texts

    async def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _ask(self, who: str, method: str, *arguments: object) -> Any:  # noqa: ANN401  MessagePack values
        async with self._turn:  # so that nobody else's request ends with a child that this one's ends
            for tries_left in reversed(range(TRIES)):
                child = await self._opened()
                try:
                    return await child.request(method, *arguments, wall_s=REQUEST_S)
                except (ChildTimeout, ChildDied) as error:
                    raise PromptError(f"{who} {error}") from error
                except ChildLost as error:
                    if not tries_left:
                        raise SamplingError(f"the tokenizer's process was ended again and again: {error}") from error
                except SandboxError as error:
                    raise SamplingError(f"the tokenizer's process failed: {error}") from error
        raise AssertionError  # the last round returns or raises

    async def _opened(self) -> Child:
        if self._child is None or not self._child.alive:
            try:
                self._child = await self._sandbox.spawn(_OPEN, str(self._model_dir), limits=LIMITS)
            except SandboxError as error:
                raise ModelError(f"{self._model_dir}: the tokenizer cannot be loaded: {error}") from error
        return self._child
