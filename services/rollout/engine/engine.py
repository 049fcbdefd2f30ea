"""The rollout engine: vLLM in this process, whose weights change while it samples.

generate ──► vLLM ──► pieces, each stamped with the version whose weights sampled it
                ▲
activate ───────┘  see services/rollout/engine/update.py
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from services.common.config.inference import Problem
from services.common.config.settings import Platform
from services.common.errors import MillraceError, ModelError, PromptError
from services.common.sandbox.pool import Sandbox
from services.common.service.process_tree import family, kill
from services.common.spec.job import JobSpec
from services.common.streams.types import Message
from services.common.weights.version import PolicyVersion
from services.rollout import metrics
from services.rollout.engine.health import StartWatch
from services.rollout.engine.model_tensors import model_shapes
from services.rollout.engine.output import EngineOutput
from services.rollout.engine.process import EngineKey, children, engine_key, in_daemon_thread, start_vllm, stop_vllm
from services.rollout.engine.prompt_process import PromptProcess
from services.rollout.engine.prompts import CHARACTERS_PER_TOKEN
from services.rollout.engine.types import (
    PRIORITY,
    ChatPiece,
    ChatRefused,
    ChatSampling,
    Piece,
    SamplingError,
    StagedWeights,
)
from services.rollout.engine.update import Activation, EngineError, WeightSwitch
from services.rollout.engine.version import VersionLabel

log = logging.getLogger(__name__)

LOAD_LIMIT_S = 1800.0
"""An engine that is not up by then is given up."""
_LOOK_S = 1.0
_PREPARE = "services.rollout.engine.prompts:prepare"
_ENDS_S = 60.0
"""A start whose processes were killed ends within this, or never."""


class Engine:
    """One vLLM engine, or none; it keeps running between jobs that need the same."""

    def __init__(self, platform: Platform, log_level: str = "INFO") -> None:
        """Nothing is started yet; `log_level`: of the tokenizers' processes."""
        self._platform = platform
        self._sandbox = Sandbox(prepare=[_PREPARE], service="rollout", log_level=log_level)
        self._llm: Any = None
        self._key: EngineKey | None = None
        self._prompts: PromptProcess | None = None
        self._switch: WeightSwitch | None = None
        self._others: set[int] | None = None
        self._starting: asyncio.Future[Any] | None = None
        self._output = EngineOutput()
        self._chat_prompts: PromptProcess | None = None
        """For chats, one of their own: rollouts never wait for a long text."""
        self.label = VersionLabel()
        self.max_model_len = 0
        self.requests = 0
        """Rollouts being sampled."""
        self.chats = 0
        """Answers to people being sampled."""
        self.progress_at = time.monotonic()
        """When the newest token came, or sampling began after standing still."""
        self.sampled = False
        """Whether a token of a rollout has come since the newest `start`."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version whose weights sample the next token; None before any was activated."""
        return self.label.version

    async def start(self, model_dir: Path, spec: JobSpec) -> None:
        """Makes the engine ready for a job: keeps the one that runs if it is the same, else starts another. Forgets the weights' label.

        Raises:
            ModelError: the model directory cannot be read, or the engine does not start with it, whatever the libraries raise.
            EngineError: a start that was given up does not end.
        """
        await self.label.change(None)
        self.sampled = False
        try:
            key = engine_key(model_dir, spec)
        except OSError as error:
            raise ModelError(f"{model_dir}: {error.strerror}") from error
        if self._key == key and self._switch is not None:
            self._switch.forget()
            self._output.about()
            return
        await self._end_start()
        await self.stop()
        log.info("starting the engine with %s", model_dir)
        started = time.monotonic()
        try:
            await self._load(model_dir, spec)
        except MillraceError:
            await self.stop()
            raise
        except Exception as error:
            cause = await self.last_error() or f"{type(error).__name__}: {error}"
            await self.stop()
            raise ModelError(f"{model_dir}: the engine does not start: {cause}") from error
        self._key = key
        self.progress_at = time.monotonic()
        metrics.ENGINE_STARTS.inc()
        metrics.DEVICES.set(spec.rollout.tensor_parallel_size)
        log.info("the engine is up after %.1f s", time.monotonic() - started)

    async def _load(self, model_dir: Path, spec: JobSpec) -> None:
        # First: vLLM, in this process, then loads a tokenizer that can be loaded.
        self._prompts, self._chat_prompts = (PromptProcess(self._sandbox, model_dir) for _ in range(2))
        await self._prompts.open()
        shapes = await asyncio.to_thread(model_shapes, model_dir)
        self._llm = await self._start_vllm(model_dir, spec)
        self._switch = WeightSwitch(self._llm, self.label, shapes)
        self.max_model_len = int(self._llm.model_config.max_model_len)

    async def _start_vllm(self, model_dir: Path, spec: JobSpec) -> Any:  # noqa: ANN401
        """vLLM, started in a thread; it goes on there when this call is cancelled, and `_end_start` ends it."""
        self._others = {child.pid for child in children()}
        output = self._output = EngineOutput()

        def start() -> Any:  # noqa: ANN401
            with output.captured():
                return start_vllm(self._platform, model_dir, spec)

        self._starting = in_daemon_thread(start, "start vLLM")
        watch = StartWatch(LOAD_LIMIT_S)
        while not (await asyncio.wait([self._starting], timeout=_LOOK_S))[0]:
            if trouble := watch.trouble(await asyncio.to_thread(self._family)):
                await self._end_start()
                raise ModelError(f"{model_dir}: the engine {trouble}")
        starting, self._starting = self._starting, None
        return starting.result()

    async def _end_start(self) -> None:
        """Two engines must never be: a start that hangs, or that nobody waits for any more (its job was retired), ends first.

        Raises:
            EngineError: it does not.
        """
        if self._starting is None:
            return
        until = time.monotonic() + _ENDS_S
        while not self._starting.done():
            if time.monotonic() > until:
                self._output.release()
                raise EngineError(f"a start of the engine that was given up has not ended within {_ENDS_S:.0f} s")
            self.kill()  # whatever it has started by now
            await asyncio.wait([self._starting], timeout=_LOOK_S)
        if self._starting.exception() is None:
            self._llm = self._starting.result()
        self._starting = None

    async def last_error(self) -> str:
        """What the engine's own processes said last of what went wrong, in one line; empty when they said nothing."""
        return await asyncio.to_thread(self._output.last_error)

    async def stop(self) -> None:
        """Ends the engine and its processes; does nothing when there is none."""
        self._key = self._switch = None
        llm, self._llm = self._llm, None
        await self.label.change(None)
        processes, self._others = self.processes, None
        await asyncio.to_thread(stop_vllm, llm, processes)
        await asyncio.to_thread(self._output.close)
        for prompts in (self._prompts, self._chat_prompts):
            if prompts is not None:
                await prompts.close()
        self._prompts = self._chat_prompts = None
        metrics.DEVICES.set(0)

    async def aclose(self) -> None:
        """Ends the engine, and the processes that it has around it."""
        await self.stop()
        await self._sandbox.stop()

    @property
    def processes(self) -> list[psutil.Process]:
        """The engine's processes, the topmost ones: what this process has started since the engine was."""
        return [] if self._others is None else [child for child in children() if child.pid not in self._others]

    @property
    def starting(self) -> bool:
        """Whether one is being started; that has a watch of its own."""
        return self._starting is not None

    @property
    def changing(self) -> bool:
        """Whether the weights are being changed, so that no token is to be expected."""
        return self._switch is not None and self._switch.changing

    @property
    def up(self) -> bool:
        """Whether there is an engine that could answer."""
        return self._llm is not None

    async def beat(self) -> None:
        """A sign of life from every worker of the engine; counts as progress."""
        await self._running.collective_rpc("millrace_beat")
        self.progress_at = time.monotonic()

    def kill(self) -> None:
        """Ends the engine's processes at once; whoever waits for them gets EngineError."""
        kill(self._family())

    def _family(self) -> list[psutil.Process]:
        return [relative for root in self.processes for relative in family(root.pid)]

    def check(self) -> None:
        """Looks whether the engine's processes live.

        Raises:
            EngineError: they don't.
        """
        if self._llm is not None and self._llm.errored:
            raise EngineError("the engine's processes died")

    async def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        """The prompt through the model's own chat template.

        Raises:
            PromptError: template or tokenizer refuse it, fail at it, or take too long or too much for it.
            SamplingError: there is no process to be had that tries.
        """
        return await self._encoder.encode(messages, most_chars=self._most_chars)

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """The rollouts' texts, special tokens left out.

        Raises:
            PromptError, SamplingError: as `prompt_token_ids`.
        """
        return await self._encoder.decode(rollouts)

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        """Samples `count` completions of one prompt; yields pieces as they come. Closing the generator aborts what is left.

        Raises:
            PromptError: the engine refuses the prompt (a token that the model does not have).
            SamplingError: it failed at this request.
            EngineError: the engine is not started, or died.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request_id = uuid.uuid4().hex
        # No seed: seeded requests break the CPU engine when their prompt is computed in two steps.
        parameters = SamplingParams(
            n=count, temperature=temperature, top_p=1.0, top_k=0, max_tokens=max_tokens, logprobs=0,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = tokens_input(prompt_token_ids, cache_salt=request_id)
        stream = self._running.generate(prompt, parameters, request_id)
        if not self.requests and not self.chats:
            self.progress_at = time.monotonic()
        metrics.BUSY.note(self.requests)
        self.requests += count
        metrics.REQUESTS_IN_FLIGHT.inc(count)
        try:
            async for output in stream:
                version = self._labelled()
                self.progress_at, self.sampled = time.monotonic(), True
                for part in output.outputs:
                    yield _piece(part, version.n)
        except MillraceError:
            raise
        except EngineDeadError as error:
            raise EngineError("the engine died") from error
        except EngineGenerateError as error:
            raise SamplingError(f"the engine failed at the request: {error.__cause__!r}") from error
        except Exception as error:  # its releases differ in what they raise for a request that they refuse
            raise PromptError(f"the engine refuses the prompt: {error}") from error
        finally:
            metrics.BUSY.note(self.requests)
            self.requests -= count
            metrics.REQUESTS_IN_FLIGHT.dec(count)
            await stream.aclose()

    async def chat_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """A chat's token ids: messages go through the chat template, a text as it is.

        Raises:
            PromptError: the template refuses it, or it has no tokens.
            SamplingError: there is no process to be had that tries.
            EngineError: the engine is not started.
        """
        if self._key is None or self._chat_prompts is None:
            raise EngineError("the engine is not started")
        if isinstance(prompt, str):
            return await self._chat_prompts.encode_text(prompt)
        return await self._chat_prompts.encode(prompt, most_chars=self._most_chars)

    async def chat(self, prompt_token_ids: list[int], sampling: ChatSampling) -> AsyncGenerator[ChatPiece, None]:
        """Samples one answer behind all rollouts; yields its text as it comes. Closing the generator aborts it.

        Whoever reads must keep up: a piece is stamped when it is taken.

        Raises:
            ChatRefused: the engine gave the request up.
            EngineError: the engine is not started, or died.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id = uuid.uuid4().hex
        parameters = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_tokens,
            stop=list(sampling.stop), output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = tokens_input(prompt_token_ids, cache_salt=request_id)
        stream = self._running.generate(prompt, parameters, request_id, priority=PRIORITY)
        if not self.requests and not self.chats:
            self.progress_at = time.monotonic()
        self.chats += 1
        try:
            async for output in stream:
                version, (part,) = self.label.version, output.outputs
                if version is None or part.finish_reason not in {None, "stop", "length"}:
                    raise ChatRefused("the engine gave the request up", Problem.ABORTED)
                self.progress_at = time.monotonic()
                yield ChatPiece(part.text, len(part.token_ids), version.n, part.finish_reason)
        except EngineDeadError as error:
            raise EngineError("the engine died") from error
        finally:
            self.chats -= 1
            await stream.aclose()

    async def activate(self, staged: StagedWeights) -> Activation:
        """Changes the weights; requests in flight go on with the new ones.

        A cancelled call still finishes: the engine is never left paused.

        Raises:
            WeightSyncError: refused, or failed and the weights before are back; sampling goes on with them.
            EngineError: the weights in the engine are not known to be whole; it stays paused.
        """
        if self._switch is None:
            raise EngineError("the engine is not started")
        change = asyncio.create_task(self._switch.change(staged), name="activate")
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            await asyncio.wait([change])
            raise
        finally:
            self.progress_at = time.monotonic()

    def _labelled(self) -> PolicyVersion:
        if self.label.version is None:
            raise EngineError("the engine sampled without a policy version")
        return self.label.version

    @property
    def _running(self) -> Any:  # noqa: ANN401
        if self._llm is None:
            raise EngineError("the engine is not started")
        return self._llm

    @property
    def _most_chars(self) -> int:
        return CHARACTERS_PER_TOKEN * self.max_model_len

    @property
    def _encoder(self) -> PromptProcess:
        if self._prompts is None:
            raise EngineError("the engine is not started")
        return self._prompts


def _piece(part: Any, policy_version: int) -> Piece:  # noqa: ANN401
    token_ids = list(part.token_ids)
    positions = part.logprobs or []
    try:
        logprobs = [position[token_id].logprob for token_id, position in zip(token_ids, positions, strict=True)]
    except (KeyError, ValueError) as error:
        raise SamplingError(f"{len(token_ids)} tokens came without a log-prob of each") from error
    return Piece(part.index, token_ids, logprobs, policy_version, part.finish_reason)
