"""Engine of the rollout service: vLLM, whose weights change while it samples.

generate ──► vLLM ──► pieces, each stamped with the version whose weights sampled it
                ▲
activate ───────┘  see services/rollout/engine/update.py
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import psutil

from services.common.config.inference import RefusalReason
from services.common.config.settings import Platform
from services.common.errors import MillraceError, ModelError, PromptError
from services.common.models.prompts import CHARACTERS_PER_TOKEN
from services.common.sandbox.pool import Sandbox
from services.common.service.lifecycle import freeze_heap
from services.common.service.process_tree import family, kill
from services.common.spec.job import JobSpec
from services.common.streams.types import Message
from services.common.weight_sync.staging import StagedWeights
from services.common.weights.snapshot import PolicyVersion
from services.rollout import metrics
from services.rollout.engine.health import StartMonitor
from services.rollout.engine.model_tensors import model_shapes
from services.rollout.engine.output import EngineOutput
from services.rollout.engine.process import (
    EngineKey,
    children,
    engine_key,
    in_daemon_thread,
    pieces_of_several_tokens,
    start_vllm,
    stop_vllm,
)
from services.rollout.engine.prompt_process import PromptProcess
from services.rollout.engine.stamps import Stamps, tokens_so_far
from services.rollout.engine.types import ChatPiece, ChatRefused, ChatSampling, Piece, SamplingError
from services.rollout.engine.update import Activation, EngineError, VersionLabel, WeightSwitch

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_LIMIT_S = 1800.0
"""A start that takes longer is aborted."""
_ABORT_LIMIT_S = 60.0
"""A start whose processes were killed ends within this time, or never."""
_POLL_INTERVAL_S = 1.0
_WARM_UP_COUNTS = (2, 3, 1)
"""Sequences of the requests before the first task: vLLM compiles its sampler for a first batch size, for any other, and for one."""
_PREPARE = "services.common.models.prompts:prepare"
_CHAT_PRIORITY = 10
"""Of a request in vLLM: rollouts have 0; a request with a larger number waits for them and is preempted first."""


class Engine:
    """One vLLM engine, or none; it keeps running between jobs that need an equal one."""

    def __init__(self, platform: Platform, log_level: str = "INFO") -> None:
        """`log_level`: of the tokenizers' processes."""
        self._platform = platform
        self._sandbox = Sandbox(prepare=[_PREPARE], service="rollout", log_level=log_level)
        self._llm: Any = None
        self._key: EngineKey | None = None
        self._prompts: PromptProcess | None = None
        self._switch: WeightSwitch | None = None
        self._others: set[int] | None = None
        """Process ids of children that were there before the engine; None while there is no engine."""
        self._starting: asyncio.Future[Any] | None = None
        self._output = EngineOutput()
        self._chat_prompts: PromptProcess | None = None
        """Of the chats: rollouts never wait for their long texts."""
        self._stamps: dict[str, Stamps] = {}
        """Of the rollouts in flight, by the id of their request."""
        self._in_pieces: dict[str, int] = {}
        """Sampling parameters by which outputs come in pieces of several tokens, where this release of vLLM has them."""
        self.label = VersionLabel()
        self.max_model_len = 0
        self.requests = 0
        """Rollouts being sampled."""
        self.chats = 0
        """Chat answers being sampled."""
        self.progress_at = time.monotonic()
        """When the newest token came, or sampling began after an idle time; monotonic seconds."""
        self.sampled = False
        """Whether a token of a rollout was sampled since the newest `start`."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version whose weights sample the next token; None before the first activation."""
        return self.label.version

    async def start(self, model_dir: Path, spec: JobSpec) -> None:
        """Makes the engine ready for a job: keeps the running one if its key is equal, else starts another. Resets the label.

        Raises:
            ModelError: the model directory cannot be read, or the engine does not start with it, whatever the libraries raise.
            EngineError: an aborted start does not end.
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
        await self._abort_start()
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
        freeze_heap()
        self.progress_at = time.monotonic()
        metrics.ENGINE_STARTS.inc()
        metrics.DEVICES.set(spec.rollout.tensor_parallel_size)
        log.info("the engine is up after %.1f s", time.monotonic() - started)

    async def _load(self, model_dir: Path, spec: JobSpec) -> None:
        # Before vLLM, which loads the tokenizer in this process: a bad one fails in the child.
        self._prompts, self._chat_prompts = (
            PromptProcess(self._sandbox, model_dir, spec.model.chat_template) for _ in range(2)
        )
        await self._prompts.open()
        shapes = await asyncio.to_thread(model_shapes, model_dir)
        self._llm = await self._start_vllm(model_dir, spec)
        self._switch = WeightSwitch(self._llm, self.label, shapes, self._note_change)
        self.max_model_len = int(self._llm.model_config.max_model_len)

    async def _warm_up(self) -> None:
        """Samples once at each count: what vLLM compiles at its first use would hold the first step, and a pause that waits for it."""
        for count in _WARM_UP_COUNTS:
            stream = self._submit(
                [0], uuid.uuid4().hex, n=count, temperature=1.0, max_tokens=1, logprobs=0, detokenize=False
            )
            async with aclosing(stream):
                async for _ in stream:
                    pass

    async def _start_vllm(self, model_dir: Path, spec: JobSpec) -> Any:  # noqa: ANN401
        """Starts vLLM in a thread, which goes on when this call is cancelled (`_abort_start` ends it), and warms it up."""
        self._others = {child.pid for child in children()}
        output = self._output = EngineOutput()

        def start() -> Any:  # noqa: ANN401
            with output.captured():
                return start_vllm(self._platform, model_dir, spec)

        self._starting = in_daemon_thread(start, "start vLLM")
        monitor = StartMonitor(_START_LIMIT_S)
        while not (await asyncio.wait([self._starting], timeout=_POLL_INTERVAL_S))[0]:
            if fault := monitor.fault(await asyncio.to_thread(self._family)):
                await self._abort_start()
                raise ModelError(f"{model_dir}: the engine {fault}")
        starting, self._starting = self._starting, None
        self._llm = starting.result()
        self._in_pieces = pieces_of_several_tokens()
        async with asyncio.timeout(_START_LIMIT_S):
            await self._warm_up()
        return self._llm

    async def _abort_start(self) -> None:
        """Ends a start that hangs or whose job was retired, or raises EngineError: two engines must never run at once."""
        if self._starting is None:
            return
        until = time.monotonic() + _ABORT_LIMIT_S
        while not self._starting.done():
            if time.monotonic() > until:
                self._output.release()
                raise EngineError(
                    f"a start of the engine that was given up has not ended within {_ABORT_LIMIT_S:.0f} s"
                )
            self.kill()  # all processes that it has started by now
            await asyncio.wait([self._starting], timeout=_POLL_INTERVAL_S)
        if self._starting.exception() is None:
            self._llm = self._starting.result()
        self._starting = None

    async def last_error(self) -> str:
        """The newest line of the engine's processes that names an error, or ""."""
        return await asyncio.to_thread(self._output.last_error)

    async def stop(self) -> None:
        """Ends the engine and its processes, if there is one."""
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
        """Ends the engine and the tokenizers' sandbox."""
        await self.stop()
        await self._sandbox.stop()

    @property
    def processes(self) -> list[psutil.Process]:
        """The engine's topmost processes: children that this process has started since the engine's start began."""
        return [] if self._others is None else [child for child in children() if child.pid not in self._others]

    @property
    def starting(self) -> bool:
        """Whether an engine is starting; `StartMonitor` monitors that."""
        return self._starting is not None

    @property
    def changing(self) -> bool:
        """Whether the weights are being changed: no token can come."""
        return self._switch is not None and self._switch.changing

    @property
    def up(self) -> bool:
        """Whether an engine runs."""
        return self._llm is not None

    async def beat(self) -> None:
        """Waits for a reply of every worker of the engine, which counts as progress."""
        await _started(self._llm).collective_rpc("millrace_beat")
        self.progress_at = time.monotonic()

    def kill(self) -> None:
        """Kills the engine's processes at once; calls in progress raise EngineError."""
        kill(self._family())

    def _family(self) -> list[psutil.Process]:
        return [relative for root in self.processes for relative in family(root.pid)]

    def check(self) -> None:
        """Raises EngineError when a process of the engine has died."""
        if self._llm is not None and self._llm.errored:
            raise EngineError("the engine's processes died")

    async def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of a prompt, by the model's own chat template.

        Raises:
            PromptError: template or tokenizer refuse it, fail, or need too much time or memory.
            SamplingError: no tokenizer process could be used.
        """
        return await _started(self._prompts).encode(messages, most_chars=self.max_prompt_chars)

    async def bridge(self, messages: Iterable[Message], *, last: int) -> list[int]:
        """Token ids between a sampled turn, whose `last` token is known, and the next one. Raises as `prompt_token_ids`."""
        return await _started(self._prompts).bridge(messages, last=last, most_chars=self.max_prompt_chars)

    async def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """Texts of the rollouts, without special tokens. Raises the errors of `prompt_token_ids`."""
        return await _started(self._prompts).decode(rollouts)

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int, shared: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Samples `count` completions of one prompt; yields pieces as they come. Closing the generator aborts the rest.

        `shared`: requests with the same one reuse each other's cached keys and values, of the present version's weights alone.

        Raises:
            PromptError: the engine refuses the prompt (a token that the model does not have).
            SamplingError: the engine failed at this request.
            EngineError: the engine is not started, or died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request_id, stamps = uuid.uuid4().hex, Stamps()
        # No seed: seeded requests break the CPU engine when their prompt is computed in two steps.
        stream = self._submit(
            prompt_token_ids, request_id, n=count, temperature=temperature, top_p=1.0, top_k=0, max_tokens=max_tokens,
            logprobs=0, detokenize=False, flat_logprobs=True, salt=self._salt(shared), **self._in_pieces,
        )  # fmt: skip
        self._stamps[request_id] = stamps
        metrics.BUSY.note(self.requests)
        self.requests += count
        metrics.REQUESTS_IN_FLIGHT.inc(count)
        try:
            async for output in stream:
                version = self._require_version()
                self.progress_at, self.sampled = time.monotonic(), True
                for part in output.outputs:
                    for piece in _pieces(part, stamps, version.n):
                        yield piece
        except MillraceError:
            raise
        except EngineDeadError as error:
            raise EngineError("the engine died") from error
        except EngineGenerateError as error:
            raise SamplingError(f"the engine failed at the request: {error.__cause__!r}") from error
        except Exception as error:  # releases of vLLM raise different errors for a request that they refuse
            raise PromptError(f"the engine refuses the prompt: {error}") from error
        finally:
            metrics.BUSY.note(self.requests)
            self.requests -= count
            metrics.REQUESTS_IN_FLIGHT.dec(count)
            del self._stamps[request_id]
            await stream.aclose()

    async def chat_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a chat: messages by the chat template, a text without it.

        Raises:
            PromptError: the template refuses it, or it has no tokens.
            SamplingError: no tokenizer process could be used.
            EngineError: the engine is not started.
        """
        prompts = _started(self._chat_prompts if self._key is not None else None)
        if isinstance(prompt, str):
            return await prompts.encode_text(prompt)
        return await prompts.encode(prompt, most_chars=self.max_prompt_chars)

    async def chat(self, prompt_token_ids: list[int], sampling: ChatSampling) -> AsyncGenerator[ChatPiece, None]:
        """Samples one answer at a lower priority than all rollouts; yields its text as it comes. Closing the generator aborts it.

        The reader must keep up: a piece is stamped with the version at the time when it is read.

        Raises:
            ChatRefused: the engine aborted the request.
            EngineError: the engine is not started, or died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        stream = self._submit(
            prompt_token_ids, uuid.uuid4().hex, _CHAT_PRIORITY, temperature=sampling.temperature, top_p=sampling.top_p,
            max_tokens=sampling.max_tokens, stop=list(sampling.stop),
        )  # fmt: skip
        self.chats += 1
        try:
            async for output in stream:
                version, (part,) = self.label.version, output.outputs
                if version is None or part.finish_reason not in {None, "stop", "length"}:
                    raise ChatRefused("the engine gave the request up", RefusalReason.ABORTED)
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
            EngineError: the weights in the engine are not known to be complete; it stays paused.
        """
        change = asyncio.create_task(_started(self._switch).change(staged), name="activate")
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            await asyncio.wait([change])
            raise
        finally:
            self.progress_at = time.monotonic()

    async def hold(self) -> None:
        """Samples nothing until `release`, or until weights are changed; requests in flight are kept. A second call changes nothing.

        A cancelled call still finishes.

        Raises:
            EngineError: the engine does not pause.
        """
        holding = asyncio.create_task(_started(self._switch).hold(), name="hold")
        try:
            await asyncio.shield(holding)
        except asyncio.CancelledError:
            await asyncio.wait([holding])
            raise

    async def release(self) -> None:
        """Ends a hold, if there is one. Raises EngineError when the engine does not resume."""
        if self._switch is not None and self._switch.holding:
            await self._switch.release()
            self.progress_at = time.monotonic()

    def _note_change(self) -> None:
        """Notes for every rollout in flight where the version in use ends; nothing is sampled now."""
        version = self.label.version
        if not self._in_pieces or version is None:
            return
        for request_id, counts in tokens_so_far(self._llm).items():
            if request_id in self._stamps:
                self._stamps[request_id].change(counts, version.n)

    def _salt(self, shared: str | None) -> str | None:
        return None if shared is None else f"{shared}:{self._require_version()}"

    def _require_version(self) -> PolicyVersion:
        if self.label.version is None:
            raise EngineError("the engine sampled without a policy version")
        return self.label.version

    @property
    def max_prompt_chars(self) -> int:
        """Longest prompt that is tokenized, characters."""
        return CHARACTERS_PER_TOKEN * self.max_model_len

    def _submit(
        self,
        prompt_token_ids: list[int],
        request_id: str,
        priority: int = 0,
        *,
        salt: str | None = None,
        **sampling: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Any, None]:
        """Stream of vLLM's outputs for one request; it shares cached keys and values with requests of the same `salt` (None: with none)."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        prompt = tokens_input(prompt_token_ids, cache_salt=salt or request_id)
        llm = _started(self._llm)
        stream: AsyncGenerator[Any, None] = llm.generate(prompt, parameters, request_id, priority=priority)
        if not self.requests and not self.chats:
            self.progress_at = time.monotonic()
        return stream


def _started(part: T | None) -> T:
    """A part of the engine that exists only while the engine is started."""
    if part is None:
        raise EngineError("the engine is not started")
    return part


def _pieces(part: Any, stamps: Stamps, version: int) -> Iterator[Piece]:  # noqa: ANN401
    """The tokens of one output of vLLM, as pieces of one version each; only the last piece can be the end."""
    token_ids, flat = list(part.token_ids), part.logprobs
    logprobs = list(flat.logprobs) if flat is not None else []
    if len(logprobs) != len(token_ids) or (flat is not None and flat.token_ids != token_ids):
        raise SamplingError(f"{len(token_ids)} tokens came without a log-prob of each")
    parts = list(stamps.split(part.index, len(token_ids), version))
    for n, (begin, end, of) in enumerate(parts, start=1):
        reason = part.finish_reason if n == len(parts) else None
        yield Piece(part.index, token_ids[begin:end], logprobs[begin:end], of, reason)
