"""What is checked before a job is taken in, beyond the shape of its spec: its model, its data and its verifiers.

The checks read files and may take long, so each runs in a thread with a deadline. One that is not done by then does not refuse the job: its
field is handed back as unchecked, and the learner, which checks again, will find what is wrong.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from services.common.errors import ConfigError
from services.common.settings import Settings
from services.common.spec import DataSourceSpec, JobSpec
from services.gateway.errors import SpecRefused
from services.gateway.schemas import FieldProblem
from services.gateway.spec_body import problems_of

DEADLINE_S = 20.0
MAX_THREADS = 4
"""Checks at once; one that outlives its deadline keeps its place until it ends."""

MARGIN_S = 1.0
"""What remains of the deadline when a reader of a large file stops looking for more."""

T = TypeVar("T")


class Checks(Protocol):
    """The checks themselves. Each raises ConfigError with `field: message` lines."""

    def model(self, spec: JobSpec) -> None:
        """The model is there, safe, and fits the parallel sizes."""

    def data(self, source: DataSourceSpec, field: str, until: float) -> frozenset[str]:
        """The source opens; the `data_source`s that its tasks name, as many as are found before `until` (monotonic seconds)."""

    def verifiers(self, overrides: Mapping[str, str]) -> None:
        """Every verifier that the job names is there."""

    def verifier(self, data_source: str, overrides: Mapping[str, str]) -> None:
        """There is a verifier for tasks of this `data_source`."""


class InstalledChecks:
    """The checks by the parts that learner and reward servers use themselves."""

    def __init__(self, settings: Settings) -> None:
        """Looks for models and data where these settings say."""
        self._settings = settings

    def model(self, spec: JobSpec) -> None:
        """The model is there, safe, and fits the parallel sizes."""
        from services.common.models import check_parallel_sizes, inspect_model, resolve_model

        check_parallel_sizes(inspect_model(resolve_model(spec.model.path, self._settings)), spec)

    def data(self, source: DataSourceSpec, field: str, until: float) -> frozenset[str]:
        """The source opens; the `data_source`s that its tasks name."""
        from services.common.data import open_source

        tasks = open_source(source, self._settings, field=field)
        if source.procedural_task is not None or source.data_source is not None:
            return frozenset({tasks[0].data_source})
        found = set()
        for index in range(len(tasks)):
            found.add(tasks[index].data_source)
            if time.monotonic() > until:
                break
        return frozenset(found)

    def verifiers(self, overrides: Mapping[str, str]) -> None:
        """Every verifier that the job names is there."""
        from services.common.verifier_names import check

        check(overrides)

    def verifier(self, data_source: str, overrides: Mapping[str, str]) -> None:
        """There is a verifier for tasks of this `data_source`."""
        from services.common.verifier_names import choose

        choose(data_source, overrides)


@dataclass(slots=True)
class _Outcome:
    """What the checks of one spec have found."""

    problems: list[FieldProblem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


class Admission:
    """Runs the checks on a spec."""

    def __init__(self, checks: Checks, *, deadline_s: float = DEADLINE_S) -> None:
        """Every check of one spec together may take `deadline_s` seconds."""
        self._checks = checks
        self._deadline_s = deadline_s
        self._places = threading.BoundedSemaphore(MAX_THREADS)

    async def admit(self, spec: JobSpec) -> tuple[str, ...]:
        """The fields that could not be checked in time; usually none.

        Raises:
            SpecRefused: names every wrong field.
        """
        until = time.monotonic() + self._deadline_s
        outcome = _Outcome()
        await self._check(outcome, until, "model.path", lambda: self._checks.model(spec))
        overrides = spec.reward.verifiers
        before = len(outcome.problems)
        await self._check(outcome, until, "reward.verifiers", lambda: self._checks.verifiers(overrides))
        known = len(outcome.problems) == before
        named: dict[str, str] = {}
        for section, source in _sources(spec):
            action = partial(self._checks.data, source, section, until - MARGIN_S)
            found = await self._check(outcome, until, f"{section}.source", action)
            named |= {name: f"{section}.data_source" for name in sorted(found or ()) if name not in named}
        for name, where in named.items() if known else ():
            await self._check(outcome, until, where, partial(self._checks.verifier, name, overrides))
        if outcome.problems:
            raise SpecRefused(outcome.problems)
        return tuple(outcome.unchecked)

    async def _check(self, outcome: _Outcome, until: float, where: str, action: Callable[[], T]) -> T | None:
        """The action's result, or None with what was wrong added to the outcome."""
        try:
            return await self._in_thread(action, until)
        except TimeoutError:
            outcome.unchecked.append(where)
        except ConfigError as error:
            outcome.problems += problems_of(error, where)
        except OSError as error:
            outcome.problems.append(FieldProblem(field=where, message=f"cannot be read: {error.strerror or error}"))
        return None

    async def _in_thread(self, action: Callable[[], T], until: float) -> T:
        """The action's result, from a thread that nobody waits for beyond the deadline, the process's end included."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, error = None, None
            if not self._places.acquire(timeout=max(0.0, until - time.monotonic())):
                return  # the request has stopped waiting too
            try:
                result = action()
            except Exception as caught:  # noqa: BLE001  carried over to the waiting request
                error = caught
            finally:
                self._places.release()
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                return  # the loop has closed: nobody waits any more

        threading.Thread(target=work, name="admission", daemon=True).start()
        async with asyncio.timeout_at(loop.time() + max(0.0, until - time.monotonic())):
            return await future


def _sources(spec: JobSpec) -> list[tuple[str, DataSourceSpec]]:
    train = [("data.train", spec.data.train)]
    return train if spec.data.eval is None else [*train, ("data.eval", spec.data.eval)]
