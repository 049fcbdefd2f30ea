"""The rollout service's engine with vLLM replaced by the script; staging, verifying, switching and labelling weights are the real ones."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from services.common.spec.job import JobSpec
from services.common.streams.types import Message
from services.rollout.engine.engine import Engine
from services.rollout.engine.output import EngineOutput
from services.rollout.engine.types import Piece
from services.rollout.engine.update import EngineError
from services.rollout.engine.worker_extension import WeightExtension
from tests.chaos.scripted import lifelike, script

SECONDS = "MILLRACE_CHAOS_TOKEN_S"
"""Environment variable: seconds that one token takes."""


class ScriptedPrompts:
    """The tokenizer: bytes."""

    def __init__(self, sandbox: object, model_dir: Path, chat_template: str | None = None) -> None:
        """Needs nothing of the model."""
        del sandbox, model_dir, chat_template

    async def open(self) -> None:
        """Is there."""

    async def close(self) -> None:
        """Is no process."""

    async def encode(self, messages: Iterable[Message], *, most_chars: int) -> list[int]:
        """The prompt's token ids."""
        del most_chars
        return script.encode(messages)

    async def bridge(self, messages: Iterable[Message], *, last: int, most_chars: int) -> list[int]:
        """The token ids between two turns."""
        del last, most_chars
        return script.bridge(messages)

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """The responses' texts."""
        return [script.text(token_ids) for token_ids in rollouts]


class ScriptedRunner:
    """vLLM's model runner, and its model: the weights as they lie, and their fingerprint."""

    def __init__(self) -> None:
        """No weights."""
        self.fingerprint = b""
        self._tensors: dict[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Takes every tensor, one after the other."""
        self.fingerprint = b""  # half applied until the last one is in
        self._tensors = {name: tensor.clone() for name, tensor in weights_iterator}
        self.fingerprint = script.fingerprint({name: tensor.numpy() for name, tensor in self._tensors.items()})

    def get_model(self) -> ScriptedRunner:
        """The model: this."""
        return self

    def modules(self) -> Iterable[torch.nn.Module]:
        """No layers: nothing is packed."""
        return ()

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights by their Hugging Face names."""
        return self._tensors.items()


class ScriptedVllm:
    """The part of `AsyncLLM` that the engine uses."""

    def __init__(self) -> None:
        """Runs, without weights."""
        self.model_config = SimpleNamespace(max_model_len=4096)
        self.errored = False
        self.engine_core = self
        self.outputs_queue: asyncio.Queue[None] = asyncio.Queue()
        self.runner = ScriptedRunner()
        self._extension = WeightExtension()
        self._extension.model_runner = self.runner
        self._running = asyncio.Event()
        self._running.set()
        self._token_s = float(os.environ.get(SECONDS, "0.005"))

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        """No token comes until `resume_generation`."""
        del mode, clear_cache
        self._running.clear()

    async def resume_generation(self) -> None:
        """Tokens come again."""
        self._running.set()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls the extension of the one worker."""
        return [await asyncio.to_thread(getattr(self._extension, method), *args)]

    async def turn(self) -> None:
        """Until the next token is due."""
        await asyncio.sleep(self._token_s)
        await self._running.wait()

    def shutdown(self, timeout: float) -> None:
        """Nothing to end."""


class ScriptedEngine(Engine):
    """Deterministic: the same weights answer the same prompt with the same tokens."""

    _finite = True
    """Whether the model's file has numbers only."""

    async def _start_vllm(self, model_dir: Path, spec: JobSpec) -> ScriptedVllm:
        """As the real one it refuses a model that it has no kernels for, or whose weights do not fit, and prints why instead of raising it.

        Raises:
            RuntimeError: it does.
        """
        del spec
        self._others = set()
        self._output = EngineOutput()
        if trouble := lifelike.engine_refuses(model_dir):
            with self._output.captured():
                os.write(2, f"(EngineCore pid=0) ERROR 01-01 00:00:00 [core.py:1] ValueError: {trouble}\n".encode())
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        self._finite = lifelike.is_finite(model_dir)
        return ScriptedVllm()

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int, shared: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Every rollout of the group grows by a token at a turn, each under the weights that are in use then.

        What it says depends on the whole prompt where that asks for no row, as after a turn with an environment.
        """
        del temperature, max_tokens, shared
        row, llm = lifelike.row_of(prompt_token_ids), self._llm
        self.requests += count
        self.progress_at = time.monotonic()
        try:
            for position in range(script.TOKENS):
                await llm.turn()
                version, mark = self.label.version, llm.runner.fingerprint
                if version is None or not mark:
                    raise EngineError("sampled without whole weights")
                self.progress_at, self.sampled = time.monotonic(), True
                end = "stop" if position == script.TOKENS - 1 else None
                for index in range(count):
                    token = script.token(mark, row, index, position)
                    logprob = script.logprob(token) if self._finite else math.nan
                    yield Piece(index, [token], [logprob], version.n, end)
        finally:
            self.requests -= count
