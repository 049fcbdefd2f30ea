"""Admission: what is checked before a job is taken in, by children that may be killed.

    body ──► child: parse, validate ──► spec ──► child: model, data, load ──► limits, verifiers ──► queue
                │ too long, too large, broken                 │ a file not read in time: unchecked
                └──► 422 with the field

A file or a model that is not done in time does not refuse the job: its field is handed back as unchecked, and the learner, which
checks again with limits of its own, will find what is wrong. A procedural source that cannot make its first task in time never will: it is
refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.config.settings import Settings
from services.common.config.verifiers import check, choose
from services.common.errors import (
    ChildDied,
    ChildLost,
    ChildTimeout,
    ConfigError,
    Problem,
    SandboxError,
)
from services.common.models.directory import ModelInfo
from services.common.models.trial import ModelFacts
from services.common.sandbox.limits import MIB, Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec
from services.gateway.admission.limits import Machine, over_limits
from services.gateway.errors import AdmissionBusy, SpecRefused

log = logging.getLogger(__name__)

CHECKS = "services.gateway.admission.checks:JobChecks"
PREPARE = "services.gateway.admission.checks:prepare"
READ = "services.gateway.admission.checks:read_body"

DEADLINE_S = 20.0
"""All checks of one spec."""
PLACES = 4
"""Specs whose checks run at once, and bodies that are parsed at once."""
PLACE_WAIT_S = 10.0
READ_LIMITS = Limits(wall_s=5.0, memory_mib=512, reply_bytes=16 * 1024 * 1024, makes_way=True)
CHECK_MEMORY_MIB = 1024
"""Beside what a dataset file may take, once as it lies and once unpacked."""
CHECK_REPLY_BYTES = 1024 * 1024


class Admission(Protocol):
    """What the routes need."""

    async def read(self, body: bytes, media_type: str) -> JobSpec:
        """The spec in a request's body; SpecRefused names every wrong field."""

    async def admit(self, spec: JobSpec) -> tuple[str, ...]:
        """The fields that could not be checked in time; SpecRefused names every wrong one."""


class ChildAdmission:
    """Admission by child processes."""

    def __init__(
        self, sandbox: Sandbox, settings: Settings, *, deadline_s: float = DEADLINE_S, checks: str | None = None
    ) -> None:
        """Whoever made the sandbox stops it.

        Args:
            sandbox: makes the children.
            settings: where models and data may lie, and the operator's limits.
            deadline_s: all checks of one spec together, seconds.
            checks: the class whose methods are the checks, as `package.module:class` (default: CHECKS).
        """
        self._sandbox, self._settings = sandbox, settings
        self._deadline_s, self._checks = deadline_s, checks or CHECKS
        self._reading, self._checking = asyncio.Semaphore(PLACES), asyncio.Semaphore(PLACES)

    async def read(self, body: bytes, media_type: str) -> JobSpec:
        """The spec in a request's body.

        Raises:
            SpecRefused: names every wrong field.
            AdmissionBusy: too many bodies are being read.
        """
        async with _place(self._reading):
            try:
                found = await self._sandbox.call(READ, body, media_type, limits=READ_LIMITS)
            except (ChildTimeout, ChildDied) as error:
                raise SpecRefused(f"the body cannot be read: it {error}", field="spec") from error
            except ConfigError as error:
                raise SpecRefused(*error.problems) from error
        return JobSpec.model_validate_json(found)

    async def admit(self, spec: JobSpec) -> tuple[str, ...]:
        """The fields that could not be checked in time; usually none.

        Raises:
            SpecRefused: names every wrong field.
            AdmissionBusy: too many specs are being checked.
        """
        async with _place(self._checking):
            trial = _Trial(self._sandbox, self._checks, spec, self._settings, time.monotonic() + self._deadline_s)
            try:
                await trial.run()
            finally:
                await trial.close()
        if trial.problems:
            raise SpecRefused(*trial.problems)
        return tuple(trial.unchecked)


@dataclass(slots=True)
class _Trial:
    """The checks of one spec, and what they have found."""

    sandbox: Sandbox
    checks: str
    spec: JobSpec
    settings: Settings
    until: float
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    child: Child | None = None

    async def run(self) -> None:
        """Makes every check, whatever the others find."""
        sources, load = _sources(self.spec), self.spec.checkpoint.load
        left = 1 + len(sources) + (load is not None)
        facts = await self._in_child("model.path", "model", self._share(left), left=left)
        self._limits_of(facts)
        named: dict[str, str] = {}
        for section, source in sources:
            left -= 1
            found = await self._data(section, source, left=left)
            named |= {name: f"data.{section}.data_source" for name in found if name not in named}
        self._verifiers(named)
        if load is not None:
            await self._load()

    async def close(self) -> None:
        """Ends the child."""
        if self.child is not None:
            await self.child.close()

    async def _data(self, section: str, source: DataSourceSpec, *, left: int) -> list[str]:
        """The `data_source`s of a section's tasks."""
        seconds = self._share(left)
        before = len(self.unchecked)
        facts = await self._in_child(f"data.{section}.source", "data", section, seconds, left=left)
        if source.procedural_task is not None and len(self.unchecked) > before:
            self.unchecked.pop()
            self._wrong(f"data.{section}.config", f"the first task was not made within {seconds:.0f} s")
        if facts is None:
            return []
        if source.procedural_task is None and not facts["all_checked"]:
            self.unchecked.append(f"data.{section}.source")
        return list(facts["data_sources"])

    def _limits_of(self, model: ModelFacts | None) -> None:
        """The job asks for no more than the operator gives; what a model needs is judged where the model is known."""
        info = ModelInfo(**model["shape"]) if model is not None else None
        parameters = model["parameters"] if model is not None else None
        self.problems += over_limits(self.spec, self.settings, Machine.here(), info, parameters)

    async def _load(self) -> None:
        """What `checkpoint.load` names can be begun with."""
        before = len(self.unchecked), len(self.problems)
        facts = await self._in_child("checkpoint.load", "load", self._share(1), left=1)
        if facts is None and before == (len(self.unchecked), len(self.problems)):
            self.unchecked.append("checkpoint.load")

    def _verifiers(self, named: dict[str, str]) -> None:
        """Every verifier that the job names is there, and there is one for each `data_source`, by the field that named it."""
        overrides = self.spec.reward.verifiers
        try:
            check(overrides)
        except ConfigError as error:
            self.problems += error.problems
            return
        for name, where in named.items():
            try:
                choose(name, overrides)
            except ConfigError as error:
                self._refused(error, where)

    async def _in_child(self, where: str, method: str, *arguments: object, left: int) -> Any:  # noqa: ANN401
        """A check's result, or None with what was wrong noted; `left`: checks that share the time, this one included."""
        for last in (False, True):
            try:
                child = await self._fresh()
                return await child.request(method, *arguments, wall_s=self._share(left))
            except ChildTimeout:
                self.unchecked.append(where)
            except ConfigError as error:
                self._refused(error, where)
            except ChildLost as error:
                if not last:
                    continue
                self._wrong(where, f"cannot be checked: {error}")
            except ChildDied as error:
                self._wrong(where, f"cannot be read: it {error}")
            except SandboxError as error:
                log.warning("%s cannot be checked: %s", where, error)
                self._wrong(where, f"cannot be checked: {error}")
            return None
        return None

    async def _fresh(self) -> Child:
        if self.child is None or not self.child.alive:
            document = self.settings.public()
            self.child = await self.sandbox.spawn(
                self.checks, self.spec.model_dump_json(), document, limits=self._child_limits()
            )
        return self.child

    def _child_limits(self) -> Limits:
        files = any(source.procedural_task is None for _, source in _sources(self.spec))
        memory_mib = CHECK_MEMORY_MIB + (2 * self.settings.max_data_bytes // MIB if files else 0)
        return Limits(wall_s=DEADLINE_S, memory_mib=memory_mib, reply_bytes=CHECK_REPLY_BYTES, makes_way=True)

    def _share(self, left: int) -> float:
        """Seconds for the next of so many checks."""
        return max(0.01, (self.until - time.monotonic()) / left)

    def _refused(self, error: ConfigError, where: str) -> None:
        """Notes an error's problems; those that name no field are of `where`."""
        self.problems += [item if item.field else Problem(where, item.message) for item in error.problems]

    def _wrong(self, where: str, message: str) -> None:
        self.problems.append(Problem(where, message))


@asynccontextmanager
async def _place(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """One of the places.

    Raises:
        AdmissionBusy: none became free in time.
    """
    try:
        async with asyncio.timeout(PLACE_WAIT_S):
            await places.acquire()
    except TimeoutError as error:
        raise AdmissionBusy("too many submissions are being checked: try again in a moment") from error
    try:
        yield
    finally:
        places.release()


def _sources(spec: JobSpec) -> list[tuple[str, DataSourceSpec]]:
    held_out = [("eval", spec.data.eval)] if spec.data.eval is not None else []
    return [("train", spec.data.train), *held_out]
