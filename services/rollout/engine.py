"""The rollout engine: vLLM in this process, whose weights change while it samples.

generate ──► vLLM ──► pieces, each stamped with the version whose weights sampled it
activate:  verify the staged file │ pause ─► apply ─► drain what was sampled before ─► label ─► resume
                  (still sampling) │ generation stands still: this is the pause
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from services.common.errors import MillraceError, ModelError, WeightSyncError
from services.common.settings import Platform
from services.common.spec import JobSpec
from services.common.types import Message
from services.rollout import metrics
from services.rollout.label import Version, VersionLabel
from services.rollout.model_tensors import Shapes, file_shapes, misfits, model_shapes
from services.rollout.pieces import Piece
from services.rollout.prompts import PromptEncoder
from services.rollout.stage import StagedWeights
from services.rollout.vllm_process import (
    EngineKey,
    children,
    engine_key,
    in_daemon_thread,
    start_vllm,
    stop_vllm,
)

log = logging.getLogger(__name__)

PAUSE_LIMIT_S = 60.0
APPLY_LIMIT_S = 600.0
_SETTLE_ROUNDS = 50


class EngineError(MillraceError):
    """The engine died, hangs, or has weights that nobody knows: this process must end, and be started again."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What it took to change the weights."""

    version: Version
    pause_s: float
    """Seconds during which nothing was sampled."""
    apply_s: float
    """Of these, the seconds that the load itself took, on the slowest worker."""


class Engine:
    """One vLLM engine, or none; it keeps running between jobs that need the same."""

    def __init__(self, platform: Platform) -> None:
        """Nothing is started yet."""
        self._platform = platform
        self._llm: Any = None
        self._key: EngineKey | None = None
        self._prompts: PromptEncoder | None = None
        self._shapes: Shapes = {}
        self._good: StagedWeights | None = None
        self._others: set[int] | None = None
        self._starting: asyncio.Future[Any] | None = None
        self._changing = asyncio.Lock()
        self.label = VersionLabel()
        self.max_model_len = 0
        self.requests = 0
        """Rollouts being sampled."""
        self.progress_at = time.monotonic()
        """When the newest token came, or sampling began after standing still."""

    @property
    def version(self) -> Version | None:
        """The version whose weights sample the next token; None before any was activated."""
        return self.label.version

    async def start(self, model_dir: Path, spec: JobSpec) -> None:
        """Makes the engine ready for a job: keeps the one that runs if it is the same, else starts another. Forgets the weights' label.

        Raises:
            ModelError: the model directory cannot be read, or the engine does not start with it.
        """
        await self.label.change(None)
        self._good = None
        try:
            key = engine_key(model_dir, spec)
        except OSError as error:
            raise ModelError(f"{model_dir}: {error.strerror}") from error
        if self._key == key:
            return
        await self._let_start_end()
        await self.stop()
        log.info("starting the engine with %s", model_dir)
        started = time.monotonic()
        self._prompts = await asyncio.to_thread(PromptEncoder, model_dir)
        self._shapes = await asyncio.to_thread(model_shapes, model_dir)
        try:
            self._llm = await self._start_vllm(model_dir, spec)
        except (RuntimeError, ValueError, OSError) as error:
            await self.stop()
            raise ModelError(f"{model_dir}: the engine does not start: {error}") from error
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self._key = key
        metrics.ENGINE_STARTS.inc()
        log.info("the engine is up after %.1f s", time.monotonic() - started)

    async def _start_vllm(self, model_dir: Path, spec: JobSpec) -> Any:  # noqa: ANN401
        """vLLM, started in a thread; it goes on there when this call is cancelled, and `_let_start_end` takes it up."""
        self._others = {child.pid for child in children()}
        self._starting = in_daemon_thread(lambda: start_vllm(self._platform, model_dir, spec), "start vLLM")
        llm = await asyncio.shield(self._starting)
        self._starting = None
        return llm

    async def _let_start_end(self) -> None:
        """Two engines must never be: a start that nobody waited for (its job was retired) ends first."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
            if self._starting.exception() is None:
                self._llm = self._starting.result()
            self._starting = None

    async def stop(self) -> None:
        """Ends the engine and its processes; does nothing when there is none."""
        self._key = None
        llm, self._llm = self._llm, None
        await self.label.change(None)
        processes, self._others = self.processes, None
        await asyncio.to_thread(stop_vllm, llm, processes)

    @property
    def processes(self) -> list[psutil.Process]:
        """The engine's processes, the topmost ones: what this process has started since the engine was."""
        return [] if self._others is None else [child for child in children() if child.pid not in self._others]

    @property
    def changing(self) -> bool:
        """Whether the weights are being changed, so that no token is to be expected."""
        return self._changing.locked()

    def check(self) -> None:
        """Looks whether the engine's processes live.

        Raises:
            EngineError: they don't.
        """
        if self._llm is not None and self._llm.errored:
            raise EngineError("the engine's processes died")

    def prompt_token_ids(self, messages: Iterable[Message]) -> list[int]:
        """The prompt through the model's own chat template.

        Raises:
            PromptError: the template refuses it.
        """
        return self._encoder.encode(messages)

    def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """The rollouts' texts, special tokens left out."""
        return self._encoder.decode(rollouts)

    async def generate(
        self, prompt_token_ids: list[int], *, count: int, temperature: float, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        """Samples `count` completions of one prompt; yields pieces as they come. Closing the generator aborts what is left.

        Raises:
            EngineError: the engine died.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        request_id = uuid.uuid4().hex
        # No seed: seeded requests break the CPU engine when their prompt is computed in two steps.
        parameters = SamplingParams(
            n=count, temperature=temperature, top_p=1.0, top_k=0, max_tokens=max_tokens, logprobs=0,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = tokens_input(prompt_token_ids, cache_salt=request_id)
        if not self.requests:
            self.progress_at = time.monotonic()
        self.requests += count
        metrics.REQUESTS_IN_FLIGHT.inc(count)
        stream = self._llm.generate(prompt, parameters, request_id)
        try:
            async for output in stream:
                version = self.label.version
                if version is None:
                    raise EngineError("the engine sampled without a policy version")
                self.progress_at = time.monotonic()
                for part in output.outputs:
                    yield _piece(part, version.n)
        except EngineDeadError as error:
            raise EngineError(f"the engine died: {error}") from error
        finally:
            self.requests -= count
            metrics.REQUESTS_IN_FLIGHT.dec(count)
            await stream.aclose()

    async def activate(self, staged: StagedWeights) -> Activation:
        """Changes the weights; requests in flight go on with the new ones.

        A cancelled call still finishes: the engine is never left paused.

        Raises:
            WeightSyncError: refused, or failed and the weights before are back; sampling goes on with them.
            EngineError: the weights in the engine are not known to be whole; it stays paused.
        """
        change = asyncio.create_task(self._activate(staged), name="activate")
        try:
            return await asyncio.shield(change)
        except asyncio.CancelledError:
            await asyncio.wait([change])
            raise

    async def _activate(self, staged: StagedWeights) -> Activation:
        version = Version(staged.lineage, staged.policy_version)
        async with self._changing:
            await self._verify(staged, version)
            started = time.monotonic()
            await self._pause()
            try:
                apply_s = await self._apply(staged)
            except Exception as error:
                await self._restore(version, error)
                raise WeightSyncError(
                    f"version {version}: not applied, the weights before are back: {error}"
                ) from error
            self._good = staged
            await self.label.change(version)
            await self._resume()
            return Activation(version, time.monotonic() - started, apply_s)

    async def _verify(self, staged: StagedWeights, version: Version) -> None:
        """Finds what is wrong with a staged file while the weights in use still sample."""
        if self.version is not None and version <= self.version:
            raise WeightSyncError(f"version {version} is not newer than {self.version}")
        try:
            wrong = misfits(self._shapes, await asyncio.to_thread(file_shapes, staged.path))
        except ModelError as error:
            raise WeightSyncError(f"version {version}: {error}") from error
        if wrong:
            raise WeightSyncError(
                f"version {version} does not fit the model: {'; '.join(wrong[:5])} ({len(wrong)} in all)"
            )
        for trouble in await self._on_workers("millrace_verify_weights", str(staged.path), staged.digests):
            if trouble:
                raise WeightSyncError(f"version {version}: {trouble}")

    async def _pause(self) -> None:
        """Stops sampling and takes in everything that was sampled before.

        vLLM answers the pause after the outputs of the last step, on the same queue; a few rounds of the event loop then bring them
        to whoever reads the streams, under the label that still says the old version.
        """
        try:
            async with asyncio.timeout(PAUSE_LIMIT_S):
                await self._llm.pause_generation(mode="keep", clear_cache=False)
        except TimeoutError as error:
            raise EngineError(f"the engine did not pause within {PAUSE_LIMIT_S:.0f} s") from error
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)

    async def _resume(self) -> None:
        self.progress_at = time.monotonic()
        try:
            async with asyncio.timeout(PAUSE_LIMIT_S):
                await self._llm.resume_generation()
        except TimeoutError as error:
            raise EngineError(f"the engine did not resume within {PAUSE_LIMIT_S:.0f} s") from error

    async def _apply(self, staged: StagedWeights) -> float:
        return float(max(await self._on_workers("millrace_apply_weights", str(staged.path))))

    async def _restore(self, version: Version, cause: Exception) -> None:
        """Puts the weights before back, whole, and goes on with them.

        It helps when the load had not begun (the file vanished). vLLM does not load again after a load that broke off within a layer;
        then the process has to end.

        Raises:
            EngineError: there are none, or they cannot be loaded either.
        """
        log.error("version %s failed in the middle of the load: fenced", version, exc_info=cause)
        if self._good is None or not self._good.path.exists():
            raise EngineError(f"version {version} was half applied and no staged version is left: {cause}") from cause
        try:
            await self._apply(self._good)
        except Exception as error:  # noqa: BLE001  whatever it is, the weights are not whole
            raise EngineError(f"version {version} was half applied, and the one before failed too: {error}") from cause
        await self._resume()

    async def _on_workers(self, method: str, *arguments: object) -> list[Any]:
        try:
            async with asyncio.timeout(APPLY_LIMIT_S):
                return list(await self._llm.collective_rpc(method, args=arguments))
        except TimeoutError as error:
            raise EngineError(f"{method} did not answer within {APPLY_LIMIT_S:.0f} s") from error

    @property
    def _encoder(self) -> PromptEncoder:
        if self._prompts is None:
            raise EngineError("the engine is not started")
        return self._prompts


def _piece(part: Any, policy_version: int) -> Piece:  # noqa: ANN401
    token_ids = list(part.token_ids)
    positions = part.logprobs or []
    logprobs = [position[token_id].logprob for token_id, position in zip(token_ids, positions, strict=True)]
    return Piece(part.index, token_ids, logprobs, policy_version, part.finish_reason)
