"""How the engine's weights change: in place, while requests are in flight.

verify the staged file │ pause ─► drain what was sampled before ─► apply ─► verify what is installed ─► label ─► resume
       (still sampling) │ nothing is sampled: this is the pause, and it is a lease

The bytes are all here before the pause begins: a learner that dies meanwhile pauses nobody. Should the pause outlast its lease, or the
weights not be known to be whole, the engine loses its label (nothing can be sampled without one) and the process ends.

Caches: requests in flight keep the keys and values that older weights made, and their tokens say which weights those were. No other request
finds them: each has a salt of its own in the prefix cache (`Engine.generate`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.errors import MillraceError, ModelError, WeightSyncError
from services.common.weights.version import PolicyVersion
from services.rollout.engine.model_tensors import Shapes, file_shapes, misfits
from services.rollout.engine.types import StagedWeights
from services.rollout.engine.version import VersionLabel

if TYPE_CHECKING:
    from services.rollout.engine.verify import Facts

log = logging.getLogger(__name__)

PAUSE_LIMIT_S = 60.0
VERIFY_LIMIT_S = 600.0
PAUSE_LEASE_S = 600.0
"""Longest time that a server may stand still for new weights."""
_SETTLE_ROUNDS = 50


class EngineError(MillraceError):
    """The engine died, hangs, or has weights that nobody knows: this process must end, and be started again."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What it took to change the weights."""

    version: PolicyVersion
    pause_s: float
    """Seconds during which nothing was sampled."""
    apply_s: float
    """Of these, the seconds that the load itself took, on the slowest worker."""


class WeightSwitch:
    """Changes the weights of one engine, one version at a time."""

    def __init__(self, llm: Any, label: VersionLabel, shapes: Shapes) -> None:  # noqa: ANN401  vLLM is untyped here
        """`label`: what `change` keeps true; `shapes`: of every tensor that a version must bring."""
        self._llm, self._label, self._shapes = llm, label, shapes
        self._good: StagedWeights | None = None
        self._lock = asyncio.Lock()

    @property
    def changing(self) -> bool:
        """Whether a change is under way."""
        return self._lock.locked()

    def forget(self) -> None:
        """The staged file of the weights in use is no longer to be had (its job has ended)."""
        self._good = None

    async def change(self, staged: StagedWeights) -> Activation:
        """One change; not to be cancelled midway.

        Raises:
            WeightSyncError: refused, or failed and the weights before are back; sampling goes on with them.
            EngineError: the weights in the engine are not known to be whole; it stays paused.
        """
        version = PolicyVersion(staged.lineage, staged.policy_version)
        async with self._lock:
            await self._verify(staged, version)
            facts = await asyncio.to_thread(_read_facts, staged)
            started = time.monotonic()
            try:
                async with asyncio.timeout(PAUSE_LEASE_S):
                    apply_s = await self._paused_change(staged, version, facts)
            except TimeoutError as error:
                await self._label.change(None)
                raise EngineError(
                    f"version {version}: paused for longer than the lease of {PAUSE_LEASE_S:g} s"
                ) from error
            except EngineError:
                await self._label.change(None)
                raise
            return Activation(version, time.monotonic() - started, apply_s)

    async def _paused_change(self, staged: StagedWeights, version: PolicyVersion, facts: Facts) -> float:
        """The change itself; returns the seconds that the load took."""
        await self._pause()
        try:
            apply_s = await self._apply(staged, facts)
        except Exception as error:
            await self._restore(version, error)
            raise WeightSyncError(f"version {version}: not applied, the weights before are back: {error}") from error
        self._good = staged
        await self._label.change(version)
        await self._resume()
        return apply_s

    async def _verify(self, staged: StagedWeights, version: PolicyVersion) -> None:
        """Finds what is wrong with a staged file while the weights in use still sample."""
        if self._label.version is not None and version <= self._label.version:
            raise WeightSyncError(f"version {version} is not newer than {self._label.version}")
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
        try:
            async with asyncio.timeout(PAUSE_LIMIT_S):
                await self._llm.resume_generation()
        except TimeoutError as error:
            raise EngineError(f"the engine did not resume within {PAUSE_LIMIT_S:.0f} s") from error

    async def _apply(self, staged: StagedWeights, facts: Facts) -> float:
        arguments = (str(staged.path), staged.digests, facts)
        done = await self._llm.collective_rpc("millrace_apply_weights", args=arguments)
        seconds, checked, total = max(done)
        if checked < total:
            log.debug("%d of %d parameters could be compared with the file after the load", checked, total)
        return float(seconds)

    async def _restore(self, version: PolicyVersion, cause: Exception) -> None:
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
            await self._apply(self._good, await asyncio.to_thread(_read_facts, self._good))
        except Exception as error:  # noqa: BLE001  whatever it is, the weights are not whole
            raise EngineError(f"version {version} was half applied, and the one before failed too: {error}") from cause
        await self._resume()

    async def _on_workers(self, method: str, *arguments: object) -> list[Any]:
        try:
            async with asyncio.timeout(VERIFY_LIMIT_S):
                return list(await self._llm.collective_rpc(method, args=arguments))
        except TimeoutError as error:
            raise EngineError(f"{method} did not answer within {VERIFY_LIMIT_S:.0f} s") from error


def _read_facts(staged: StagedWeights) -> Facts:
    """What the installed weights are compared with. Here, and not in the workers, so that they go on sampling meanwhile."""
    from services.rollout.engine.verify import read_facts  # needs torch, which comes with the engine

    return read_facts(staged.path)
