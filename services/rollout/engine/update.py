"""Update of the engine's weights: in place, while requests are in flight.

verify the staged file │ pause ─► drain what was sampled before ─► apply ─► verify what is installed ─► label ─► resume
       (still sampling) │ nothing is sampled: this is the pause, and its length is limited by a lease

All bytes are here before the pause begins: a learner that dies meanwhile pauses no server. If the pause exceeds its lease, or the weights
are not known to be complete, the engine loses its label (without one nothing can be sampled) and the process ends.

Caches: requests in flight keep the keys and values of older weights, and their tokens name those weights. No other request can use them:
each has a salt of its own in the prefix cache (`Engine.generate`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.common.errors import MillraceError, WeightSyncError
from services.common.weight_sync.staging import StagedWeights
from services.common.weights.snapshot import PolicyVersion
from services.rollout.engine.model_tensors import Shapes, shape_differences

if TYPE_CHECKING:
    from services.rollout.engine.verify import Facts

log = logging.getLogger(__name__)

PAUSE_LEASE_S = 600.0
"""Longest time without sampling for new weights."""
_PAUSE_TIMEOUT_S = 60.0
_SETTLE_ROUNDS = 16
"""Parts of 128 outputs of the largest batch (1,024), twice."""


class EngineError(MillraceError):
    """The engine died, hangs, or has unknown weights: this process must end and be started again."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Cost of one change of the weights."""

    version: PolicyVersion
    pause_s: float
    """Seconds during which nothing was sampled."""
    apply_s: float
    """Seconds of the load within the pause, on the slowest worker."""


class VersionLabel:
    """Policy version of the engine's weights; None while they are not known to be any version: then nothing may be sampled."""

    def __init__(self) -> None:
        self._version: PolicyVersion | None = None
        self._changed = asyncio.Condition()

    @property
    def version(self) -> PolicyVersion | None:
        """The version whose weights sample the next token."""
        return self._version

    async def change(self, version: PolicyVersion | None) -> None:
        """Sets the version, and wakes all waiters."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def wait_for(self, version: PolicyVersion, timeout_s: float | None = None) -> bool:
        """Waits until the engine has this version or a newer one; False when it has not within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._version is not None and self._version >= version)
        except TimeoutError:
            return False
        return True


class WeightSwitch:
    """Changes the weights of one engine, one version at a time."""

    def __init__(self, llm: Any, label: VersionLabel, shapes: Shapes, on_pause: Callable[[], None]) -> None:  # noqa: ANN401  vLLM is untyped here
        """`label`: `change` keeps it up to date; `shapes`: of every tensor that a version must bring; `on_pause`: called in each pause."""
        self._llm, self._label, self._shapes, self._on_pause = llm, label, shapes, on_pause
        self._good: StagedWeights | None = None
        self._lock = asyncio.Lock()
        self.holding = False
        """Whether nothing is sampled, with the weights as they are."""

    @property
    def changing(self) -> bool:
        """Whether a change is in progress, or nothing is sampled."""
        return self._lock.locked() or self.holding

    def forget(self) -> None:
        """Drops the staged file of the weights in use: its job has ended, and the file is gone."""
        self._good = None

    async def hold(self) -> None:
        """Stops sampling until `release`, or until a change has ended; must not be cancelled midway."""
        async with self._lock:
            if not self.holding:
                await self._pause()
                self.holding = True

    async def release(self) -> None:
        """Ends a hold."""
        async with self._lock:
            if self.holding:
                await self._resume()

    async def change(self, staged: StagedWeights) -> Activation:
        """Changes the weights once, with the errors of `Engine.activate`; must not be cancelled midway."""
        version = PolicyVersion(staged.lineage, staged.policy_version)
        async with self._lock:
            facts = await self._verify(staged, version)
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
        """Pauses, applies and resumes; returns the seconds of the load."""
        await self._pause()
        try:
            self._on_pause()
            apply_s = await self._apply(staged, facts)
        except Exception as error:
            await self._restore(version, error)
            raise WeightSyncError(f"version {version}: not applied, the weights before are back: {error}") from error
        self._good = staged
        await self._label.change(version)
        await self._resume()
        return apply_s

    async def _verify(self, staged: StagedWeights, version: PolicyVersion) -> Facts:
        """Finds errors of a staged file while the weights in use still sample; returns its facts.

        Not in the workers: an engine samples nothing while its workers do something else.
        """
        if self._label.version is not None and version <= self._label.version:
            raise WeightSyncError(f"version {version} is not newer than {self._label.version}")
        try:
            facts = await asyncio.to_thread(_read_facts, staged)
        except WeightSyncError as error:
            raise WeightSyncError(f"version {version}: {error}") from error
        wrong = shape_differences(self._shapes, {name: tuple(shape) for name, (_, shape, _) in facts.items()})
        if wrong:
            raise WeightSyncError(
                f"version {version} does not fit the model: {'; '.join(wrong[:5])} ({len(wrong)} in all)"
            )
        return facts

    async def _pause(self) -> None:
        """Stops sampling, and lets vLLM receive all that was sampled before, while the label is still the old version.

        The pause is confirmed after the outputs of the last step, on the same connection: by then they are in the queue of vLLM's output
        handler, which takes them in parts, one for each round of the event loop.
        """
        core = self._llm.engine_core
        # Not `pause_generation`, which sleeps for 20 ms after this call, for the sake of orders of events that are not ours.
        async with _limited(_PAUSE_TIMEOUT_S, "the engine did not pause"):
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
            while not core.outputs_queue.empty():  # noqa: ASYNC110  vLLM's own queue
                await asyncio.sleep(0)
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)

    async def _resume(self) -> None:
        self.holding = False
        async with _limited(_PAUSE_TIMEOUT_S, "the engine did not resume"):
            await self._llm.resume_generation()

    async def _apply(self, staged: StagedWeights, facts: Facts) -> float:
        arguments = (str(staged.path), staged.digests, facts)
        seconds, checked, total = max(await self._llm.collective_rpc("millrace_apply_weights", args=arguments))
        if checked < total:
            log.debug("%d of %d parameters could be compared with the file after the load", checked, total)
        return float(seconds)

    async def _restore(self, version: PolicyVersion, cause: Exception) -> None:
        """Restores the weights before and resumes with them; raises EngineError if there are none, or if they cannot be loaded either.

        This works when the load had not begun (the file vanished). After a load that broke off within a layer vLLM cannot load again;
        then the process has to end.
        """
        log.error("version %s failed in the middle of the load: fenced", version, exc_info=cause)
        if self._good is None or not self._good.path.exists():
            raise EngineError(f"version {version} was half applied and no staged version is left: {cause}") from cause
        try:
            await self._apply(self._good, await asyncio.to_thread(_read_facts, self._good))
        except Exception as error:  # noqa: BLE001  whatever it is, the weights are not complete
            raise EngineError(f"version {version} was half applied, and the one before failed too: {error}") from cause
        await self._resume()


@asynccontextmanager
async def _limited(limit_s: float, failure: str) -> AsyncIterator[None]:
    """Raises EngineError with `failure` when the body takes longer than `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise EngineError(f"{failure} within {limit_s:.0f} s") from error


def _read_facts(staged: StagedWeights) -> Facts:
    from services.rollout.engine.verify import read_facts  # needs torch, which is installed with the engine

    return read_facts(staged.path, staged.digests)
