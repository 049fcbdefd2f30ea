"""Lifecycle of a service: its loops run concurrently, SIGTERM starts the drain, and the death of a loop ends the process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from services.common.service.watchdog import BLOCKED_S, LoopGuard

log = logging.getLogger(__name__)

T = TypeVar("T")


def freeze_heap() -> None:
    """Takes what exists by now (modules, a model) out of garbage collection, which would walk it again and again; what is garbage goes.

    A later call takes over what has been made since, and frees what has become garbage of what was there.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Drain:
    """Request to the service to take no more work; set once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Whether the service is draining."""
        return self._event.is_set()

    def request(self) -> None:
        """Starts the drain."""
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits at most `timeout_s` seconds for the drain; returns whether it was requested."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)
        return self.requested

    def on_signals(self) -> None:
        """Makes SIGTERM and SIGINT request the drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)


async def run_service(
    drain: Drain,
    loops: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    *,
    drain_timeout_s: float,
    blocked_s: float = BLOCKED_S,
) -> None:
    """Runs the named loops until all have ended.

    Each loop returns soon after `drain` is requested. A loop that raises, or returns without a drain, starts the drain, and its error is
    raised at the end; loops that still run after `drain_timeout_s` are cancelled. The process exits when a callback blocks the event loop
    for `blocked_s` seconds.
    """
    guard = LoopGuard(blocked_s)
    guard.start()
    pending = {asyncio.create_task(loop(), name=name) for name, loop in loops.items()}
    first: BaseException | None = None
    draining = asyncio.create_task(drain.wait(), name="drain")
    try:
        while pending and not drain.requested:
            await asyncio.wait({*pending, draining}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task.done()]:
                failure = _failure(task, drain)
                first = first or failure
                drain.request()
                pending.discard(task)
        if pending:
            done, pending = await asyncio.wait(pending, timeout=drain_timeout_s)
            for task in done:
                failure = _failure(task, drain)  # logs each, whichever is raised
                first = first or failure
    finally:
        draining.cancel()
        for task in pending:
            log.warning("loop %s did not drain within %.0f s", task.get_name(), drain_timeout_s)
            task.cancel()
        await asyncio.gather(*pending, draining, return_exceptions=True)
        guard.stop()
    if first is not None:
        raise first


def _failure(task: asyncio.Task[None], drain: Drain) -> BaseException | None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("loop %s died", task.get_name(), exc_info=error)
        return error
    return None if drain.requested else RuntimeError(f"loop {task.get_name()} ended without being asked to")


async def unless(interruption: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], name: str) -> T | None:
    """The result of the work, whose task gets this name; None when the interruption ends first. Both have ended when this returns."""
    working = asyncio.create_task(work, name=name)
    waiting = asyncio.create_task(interruption, name=f"interruption of {name}")
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def every(period_s: float, drain: Drain, action: Callable[[], Awaitable[None]]) -> None:
    """Repeats an action until the drain."""
    while True:
        await action()
        if await drain.wait(period_s):
            return
