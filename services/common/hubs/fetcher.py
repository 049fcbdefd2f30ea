"""Fetcher: the parent's side of all fetches of one process. It waits, watches and kills; children do the work.

fetch(a) ─┐
fetch(a) ─┼─► one task for each reference ─► child ─► partial files      bytes on the disk are the progress
fetch(b) ─┘      │ no byte for a while: killed; broken off: tried again, from where it was
                 └ nobody waits any longer: killed
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from services.common.config.hub_folder import FILES, size_of
from services.common.config.settings import Settings
from services.common.errors import ChildTimeout, ConfigError, HubError, HubRefused, SandboxError
from services.common.hubs.choice import show_bytes
from services.common.hubs.work import PARTS, Plan, read_plan
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Sandbox
from services.common.sandbox.processes import HUB_TOKENS
from services.common.spec.reference import Reference, parse_reference

log = logging.getLogger(__name__)

SURVEY = "services.common.hubs.work:survey"
FETCH = "services.common.hubs.work:fetch"
PREPARE = "services.common.hubs.work:prepare"

SURVEY_S = 20.0
"""Longest survey: a person waits for it."""
FETCH_S = 7 * 24 * 3600.0
"""Longest fetch, however steadily its bytes come."""
MEMORY_MIB = 2048
MAX_TRIES = 10
"""Tries in a row without a new byte after which a fetch fails."""
MAX_PAUSE_S = 60.0
"""Longest pause between two tries; the first is a second."""
MAX_FETCHES = 2
"""Fetches at once; others wait for their turn."""
POLL_INTERVAL_S = 1.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_XET": "1", "MODELSCOPE_LOG_LEVEL": "CRITICAL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is. Example: Progress(300_000_000, 988_000_000, "")."""

    bytes: int
    of_bytes: int
    """0 while it is not known."""
    trouble: str
    """Why it is tried again, or waits; empty while bytes come."""

    def __str__(self) -> str:
        of = f"{self.bytes * 100 // self.of_bytes} % of {show_bytes(self.of_bytes)}" if self.of_bytes else ""
        return ", ".join(filter(None, (of, self.trouble)))


Report = Callable[[Progress], Awaitable[None]]


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    waiters: int = 0


@dataclass(slots=True)
class _State:
    """What is known of one reference's fetch."""

    trouble: str = ""
    tries: int = 0


@dataclass(slots=True)
class Fetcher:
    """All fetches of one process. `async with Fetcher.of(settings) as fetcher:`."""

    sandbox: Sandbox
    settings: Settings
    _running: dict[str, _Running] = field(default_factory=dict)
    _states: dict[str, _State] = field(default_factory=dict)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES))

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """A fetcher with a sandbox of its own, whose children alone have the hubs' tokens; starts nothing yet."""
        sandbox = Sandbox(
            prepare=[PREPARE], service="hub", log_level=settings.log_level, environment=child_environment(os.environ)
        )
        return cls(sandbox, settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends all fetches; what they have fetched stays for the next."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sandbox.stop()

    def is_complete(self, reference: Reference) -> bool:
        """Whether it is there, whole."""
        return self.settings.hub_folder.is_complete(reference)

    async def survey(self, reference: Reference) -> Reference:
        """The reference with its commit; asks the hub unless it is there, whole.

        Raises:
            HubRefused: it does not exist, is not accessible, or may not be used here.
            HubError: the hub does not answer.
        """
        if self.is_complete(reference):
            return reference
        self._require_allowed(reference)
        limits = self._limits(SURVEY_S)
        try:
            plan: Plan = await self.sandbox.call(SURVEY, *self._arguments(reference), limits=limits)
        except ChildTimeout as error:
            raise HubError(f"the hub does not answer within {SURVEY_S:g} s") from error
        return parse_reference(plan["reference"])

    async def fetch(self, reference: Reference, report: Report | None = None) -> None:
        """Fetches a resolved reference; callers that want the same share one fetch, which ends when the last is cancelled.

        `report` is called about once a second.

        Raises:
            HubRefused: another try does not help.
            HubError: the tries are used up; what was fetched is kept.
        """
        if self.is_complete(reference):
            return
        self._require_allowed(reference)
        key = str(reference)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running(asyncio.create_task(self._fetch(reference), name=f"fetch {key}"))
        running.waiters += 1
        try:
            while not running.task.done():
                await asyncio.wait({running.task}, timeout=POLL_INTERVAL_S)
                if report is not None and not running.task.done():
                    await report(await self.progress(reference))
            running.task.result()
        finally:
            running.waiters -= 1
            if not running.waiters:
                self._running.pop(key, None)
                running.task.cancel()
                with suppress(asyncio.CancelledError, HubError, HubRefused, SandboxError):
                    await running.task

    async def progress(self, reference: Reference) -> Progress:
        """How far the fetch of a resolved reference is."""
        partial, state = self.settings.hub_folder.partial(reference), self._states.get(str(reference), _State())
        have, _ = await asyncio.to_thread(_activity, partial)
        plan = await asyncio.to_thread(read_plan, partial)
        of_bytes = 0 if plan is None else plan["bytes"]
        return Progress(min(have, of_bytes), of_bytes, state.trouble)

    async def _fetch(self, reference: Reference) -> None:
        key = str(reference)
        state = self._states.setdefault(key, _State())
        try:
            if self._turns.locked():
                state.trouble = f"it waits for its turn: {MAX_FETCHES} others are being fetched"
            async with self._turns:
                state.trouble = ""
                await self._try(reference, state)
        finally:
            self._states.pop(key, None)

    async def _try(self, reference: Reference, state: _State) -> None:
        """Tries until the reference is there, or MAX_TRIES in a row have brought no byte."""
        partial = self.settings.hub_folder.partial(reference)
        have = -1
        while not self.is_complete(reference):
            before, have = have, (await asyncio.to_thread(_activity, partial))[0]
            state.tries = 1 if have > before else state.tries + 1
            try:
                await self._watched(reference, partial)
            except (HubError, SandboxError) as error:
                log.warning("the fetch of %s broke off: %s", reference, error)
                if state.tries >= MAX_TRIES:
                    raise HubError(f"{error}: {MAX_TRIES} tries brought no byte; what is there is kept") from error
                pause_s = min(MAX_PAUSE_S, 2.0 ** (state.tries - 1))
                state.trouble = f"{error}: tried again"
                await asyncio.sleep(pause_s)
                state.trouble = ""

    async def _watched(self, reference: Reference, partial: Path) -> None:
        """One try, killed when nothing happens for too long. Raises HubError then, else as the child."""
        limits = self._limits(FETCH_S)
        work = asyncio.create_task(self.sandbox.call(FETCH, *self._arguments(reference), limits=limits))
        loop = asyncio.get_running_loop()
        seen, since = await asyncio.to_thread(_activity, partial), loop.time()
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=POLL_INTERVAL_S)
                now = await asyncio.to_thread(_activity, partial)
                if now != seen:
                    seen, since = now, loop.time()
                elif loop.time() - since > self.settings.hub_stall_s:
                    raise HubError(f"no byte came for {self.settings.hub_stall_s:g} s")
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _require_allowed(self, reference: Reference) -> None:
        allowed = self.settings.allowed_hubs
        if reference.hub not in allowed:
            listed = ", ".join(allowed) or "none"
            raise HubRefused(f"nothing is fetched from {reference.hub} here (MILLRACE_HUBS allows: {listed})")

    def _arguments(self, reference: Reference) -> tuple[str, str, int]:
        folder, limit = self.settings.hub_folder, int(self.settings.max_hub_bytes)
        if reference.file:
            limit = min(limit, self.settings.max_data_bytes)
        return str(reference), str(folder.root.resolve()), limit

    def _limits(self, wall_s: float) -> Limits:
        most = int(self.settings.max_hub_bytes)
        return Limits(wall_s=wall_s, memory_mib=MEMORY_MIB, low_priority=True, file_bytes=most)


def _activity(partial: Path) -> tuple[int, float]:
    """Bytes that a fetch has, and the time of the child's newest sign of life."""
    try:
        beat = (partial / "beat").stat().st_mtime
    except OSError:
        beat = 0.0
    return size_of(partial / FILES) + size_of(partial / PARTS), beat


def child_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables of the children that fetch: the hubs' tokens, also from the files that `<NAME>_FILE` names.

    Raises ConfigError for a file that cannot be read.
    """
    tokens = {name: value for name, value in inherited.items() if name.startswith(HUB_TOKENS)}
    for name in HUB_TOKENS:
        path = inherited.get(f"{name}_FILE")
        if path and name not in inherited and (token := _read(f"{name}_FILE", path)):
            tokens[name] = token
    return {**tokens, **_ENVIRONMENT}


def _read(variable: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable}: cannot read {path}: {getattr(error, 'strerror', 'not text')}") from error
