"""Admission: the checks before a job is accepted, by child processes that may be killed.

    body ──► child: parse, validate ──► spec ──► child: models, data, load ──► limits, plug-ins ──► queue
                │ too long, too large, broken                 │ a file not read in time: unchecked
                └──► 422 with the field

A file or a model whose check does not end in time does not refuse the job: its field is returned as unchecked, and the learner, which
checks again with limits of its own, finds what is wrong. A procedural source that cannot make its first task in time never will: it is
refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from services.common.config.judges import check_judges
from services.common.config.plugins import check_installed
from services.common.config.settings import Settings
from services.common.config.verifiers import CODE_IS_OFF, BuiltIn, check_reward, choose_verifier
from services.common.environments.types import Worlds
from services.common.errors import ChildDied, ChildLost, ChildTimeout, ConfigError, Problem, SandboxError
from services.common.models.directory import ModelInfo
from services.common.models.roles import named_models
from services.common.models.trial import ModelFacts
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec
from services.gateway.admission.automatic import settle
from services.gateway.admission.episodes import NotTried, first_observation
from services.gateway.admission.limits import Machine, over_limits
from services.gateway.admission.preview import Preview
from services.gateway.errors import AdmissionBusy, SpecRefused
from services.gateway.trackers.available import check_trackers

log = logging.getLogger(__name__)

CHECKS = "services.gateway.admission.checks:JobChecks"
PREPARE = "services.gateway.admission.checks:prepare"
READ = "services.gateway.admission.checks:read_body"

DEADLINE_S = 20.0
"""All checks of one spec."""
MAX_CONCURRENT_CHECKS = 4
"""Specs whose checks run at once, and bodies that are parsed at once."""
QUEUE_TIMEOUT_S = 10.0
RAW_TEXTS = "services.gateway.admission.raw_texts:decode"

READ_LIMITS = Limits(wall_s=5.0, memory_mib=512, reply_bytes=16 * 1024 * 1024, low_priority=True)
RAW_LIMITS = Limits(wall_s=DEADLINE_S, memory_mib=2048, reply_bytes=16 * 1024 * 1024, low_priority=True)
CHECK_MEMORY_MIB = 2048
"""Files are read piece by piece, so that it does not depend on their size."""
CHECK_REPLY_BYTES = 1024 * 1024
PREVIEW_S = 6.0
"""Counting of prompts; a child may take twice as long, the loading of its tokenizer included."""
PREVIEW_BYTES = 16 * 1024 * 1024
TRIAL_S = 10.0
"""The beginning of one episode."""
SHOWN_CHARS = 200
"""Of what an environment says first."""


class Admission:
    """Checks of bodies and specs, in children of a sandbox."""

    def __init__(
        self,
        sandbox: Sandbox,
        settings: Settings,
        worlds: Worlds | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        checks: str = CHECKS,
    ) -> None:
        """The caller stops the sandbox.

        `worlds`: where environments are tried; None: their fields are unchecked. `checks`: the class whose methods are the checks, as
        `package.module:class`.
        """
        self._sandbox, self._settings, self._worlds = sandbox, settings, worlds
        self._deadline_s, self._checks = deadline_s, checks
        self._reading, self._checking = (asyncio.Semaphore(MAX_CONCURRENT_CHECKS) for _ in range(2))

    async def read(self, body: bytes, media_type: str) -> JobSpec:
        """The spec in a body, its automatic values settled. Raises SpecRefused for wrong fields, AdmissionBusy at the limit."""
        async with _acquired(self._reading):
            try:
                spec = await self._sandbox.call(READ, body, media_type, limits=READ_LIMITS)
            except (ChildTimeout, ChildDied) as error:
                raise SpecRefused(f"the body cannot be read: it {error}", field="spec") from error
            except ConfigError as error:
                raise SpecRefused(*error.problems) from error
        return settle(JobSpec.model_validate_json(spec), self._settings, Machine.here())

    async def admit(self, spec: JobSpec, *, missing: Collection[str] = ()) -> tuple[str, ...]:
        """Fields that could not be checked in time. Raises SpecRefused for wrong ones; AdmissionBusy at the limit.

        `missing`: fields whose files are still to be fetched; they are passed over, and what depends on them is not reported as unchecked.
        """
        async with _acquired(self._checking):
            deadline = time.monotonic() + self._deadline_s
            checks = _SpecChecks(
                self._sandbox, self._checks, spec, self._settings, deadline, frozenset(missing), self._worlds
            )
            try:
                await checks.run()
            finally:
                await checks.close()
        if checks.problems:
            raise SpecRefused(*checks.problems)
        return () if missing else tuple(checks.unchecked)

    async def previews(self, spec: JobSpec) -> tuple[dict[str, Preview], list[str]]:
        """The prompts of each section of `data`, and notes on those that cannot be had. `admit` must have accepted the spec.

        Raises SpecRefused for what `admit` could not check in time; AdmissionBusy at the limit.
        """
        found: dict[str, Preview] = {}
        notes: list[str] = []
        sources = _sources(spec)
        async with _acquired(self._checking):
            for section, source in sources:
                try:
                    if source.environment is not None:
                        notes.append(await self._first_words(spec, section, source))
                    else:
                        found[section] = await self._preview(spec, section, PREVIEW_S / len(sources))
                except ConfigError as error:
                    raise SpecRefused(*error.problems) from error
                except SandboxError as error:
                    notes.append(f"prompts of data.{section} were not counted: it {error}")
        return found, notes

    async def _first_words(self, spec: JobSpec, section: str, source: DataSourceSpec) -> str:
        try:
            observation = await first_observation(spec, section, source, self._worlds, TRIAL_S)
        except NotTried as error:
            return f"data.{section}: its environment was not tried: {error}"
        said = " ".join(message.content for message in observation.messages)
        return f"data.{section}: environment {source.environment} begins with {said[:SHOWN_CHARS]!r}"

    async def _preview(self, spec: JobSpec, section: str, seconds: float) -> Preview:
        child = await _spawn(self._sandbox, self._checks, spec, self._settings, PREVIEW_BYTES)
        try:
            return cast("Preview", await child.request("preview", section, seconds, wall_s=2 * seconds))
        finally:
            await child.close()

    async def raw_texts(self, spec: JobSpec, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token ids by the job's tokenizer, special tokens included.

        Raises SpecRefused when the model or its tokenizer cannot be used any more; AdmissionBusy at the limit.
        """
        arguments = spec.model_dump_json(), self._settings.public(), [list(ids) for ids in sequences]
        async with _acquired(self._reading):
            try:
                return cast("list[str]", await self._sandbox.call(RAW_TEXTS, *arguments, limits=RAW_LIMITS))
            except (ChildTimeout, ChildDied) as error:
                raise SpecRefused(f"raw texts cannot be made: it {error}", field="raw") from error
            except ConfigError as error:
                raise SpecRefused(f"raw texts cannot be made: {error}", field="raw") from error


@dataclass(slots=True)
class _SpecChecks:
    """The checks of one spec, and their results."""

    sandbox: Sandbox
    checks: str
    spec: JobSpec
    settings: Settings
    deadline: float
    missing: frozenset[str] = frozenset()
    worlds: Worlds | None = None
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    child: Child | None = None

    async def run(self) -> None:
        """Runs every check, whatever the results of the others."""
        sources, roles, load = _sources(self.spec), named_models(self.spec), self.spec.checkpoint.load
        reward_models, plays = self.spec.reward.reward_models, self.spec.environment is not None
        remaining = 1 + plays + len(roles) + len(reward_models) + len(sources) + (load is not None)
        facts: ModelFacts | None = await self._check("model.path", "model", self._share(remaining), remaining=remaining)
        model = None if facts is None else ModelInfo(**facts["shape"])
        parameters = {} if facts is None else {"model": facts["parameters"]}
        if plays:
            remaining -= 1
            await self._check("model.path", "turns", remaining=remaining)
        for role in roles:
            remaining -= 1
            parameters |= await self._role(role, remaining=remaining)
        for name in reward_models:
            remaining -= 1
            arguments = name, self._share(remaining)
            await self._check(f"reward.reward_models.{name}.path", "reward_model", *arguments, remaining=remaining)
        self._installed()
        self.problems += over_limits(self.spec, self.settings, Machine.here(), model, parameters)
        found: dict[str, list[str]] = {}
        for section, source in sources:
            remaining -= 1
            found[section] = await self._data(section, source, remaining=remaining)
        self._verifiers(found)
        if load is not None:
            await self._load()

    async def close(self) -> None:
        """Ends the child."""
        if self.child is not None:
            await self.child.close()

    async def _role(self, role: str, *, remaining: int) -> dict[str, int]:
        """The number of parameters of a role's own model, by its section; empty when it is not known."""
        arguments = role, self._share(remaining)
        facts: ModelFacts | None = await self._check(f"{role}.path", "role", *arguments, remaining=remaining)
        return {} if facts is None else {role: facts["parameters"]}

    async def _data(self, section: str, source: DataSourceSpec, *, remaining: int) -> list[str]:
        """The `data_source`s of a section's tasks."""
        seconds, before = self._share(remaining), len(self.unchecked)
        facts = await self._check(f"data.{section}.source", "data", section, seconds, remaining=remaining)
        if source.procedural_task is not None and len(self.unchecked) > before:
            self.unchecked.pop()
            self._add(f"data.{section}.config", f"the first task was not made within {seconds:.0f} s")
        if source.environment is not None and facts is not None:
            await self._environment(section, source, seconds)
        if facts is None:
            return []
        if source.is_file and not facts["all_checked"]:
            self.unchecked.append(f"data.{section}.source")
        return list(facts["data_sources"])

    async def _environment(self, section: str, source: DataSourceSpec, seconds: float) -> None:
        """The environment of a section begins; unchecked where no server could try it."""
        try:
            observation = await first_observation(self.spec, section, source, self.worlds, min(seconds, TRIAL_S))
        except NotTried:
            self.unchecked.append(f"data.{section}.source")
        except ConfigError as error:
            self.problems += error.problems
        else:
            if observation.done:
                self._add(f"data.{section}.source", f"environment {source.environment} is over before the first turn")

    async def _load(self) -> None:
        """The checkpoint of `checkpoint.load` can be loaded; unchecked where the child could not check it."""
        before = len(self.unchecked), len(self.problems)
        facts = await self._check("checkpoint.load", "load", self._share(1), remaining=1)
        if facts is None and before == (len(self.unchecked), len(self.problems)):
            self.unchecked.append("checkpoint.load")

    def _installed(self) -> None:
        """Every function of section `algorithm` that an installed package is to offer exists, every judge's endpoint, and every tracker."""
        self._collect(partial(check_installed, self.spec.algorithm))
        self._collect(partial(check_judges, self.spec.reward.judges, self.settings.judge_endpoints))
        self._collect(partial(check_trackers, self.spec.trackers, self.settings))

    def _collect(self, check: Callable[[], None]) -> None:
        """Adds the problems that a check raises."""
        try:
            check()
        except ConfigError as error:
            self.problems += error.problems

    def _verifiers(self, found: dict[str, list[str]]) -> None:
        """Every scorer that the spec names exists, and each `data_source` has one; `found`: the `data_source`s of each section."""
        reward = self.spec.reward
        try:
            check_reward(reward, code=self.settings.runs_code)
        except ConfigError as error:
            self.problems += error.problems
            return
        for section, names in found.items():
            for name in names:
                try:
                    chosen = choose_verifier(name, reward, held_out=section == "eval")
                except ConfigError as error:
                    self._add_error(f"data.{section}.data_source", error)
                    continue
                if chosen == BuiltIn.CODE and not self.settings.runs_code:
                    self._add(f"data.{section}.data_source", CODE_IS_OFF)

    async def _check(self, where: str, method: str, *arguments: object, remaining: int) -> Any:  # noqa: ANN401
        """A check's result, or None with the problem added; `remaining`: checks that share the time, this one included."""
        if where in self.missing:
            return None
        for last in (False, True):
            try:
                child = await self._live_child()
                return await child.request(method, *arguments, wall_s=self._share(remaining))
            except ChildTimeout:
                self.unchecked.append(where)
            except ConfigError as error:
                self._add_error(where, error)
            except ChildLost as error:
                if not last:
                    continue
                raise AdmissionBusy(f"{where} cannot be checked now: it {error}") from error
            except ChildDied as error:
                self._add(where, f"cannot be read: it {error}")
            except SandboxError as error:
                log.warning("%s cannot be checked: %s", where, error)
                self._add(where, f"cannot be checked: {error}")
            return None
        return None

    async def _live_child(self) -> Child:
        if self.child is None or not self.child.alive:
            self.child = await _spawn(self.sandbox, self.checks, self.spec, self.settings, CHECK_REPLY_BYTES)
        return self.child

    def _share(self, remaining: int) -> float:
        """Seconds for the next of the remaining checks."""
        return max(0.01, (self.deadline - time.monotonic()) / remaining)

    def _add_error(self, where: str, error: ConfigError) -> None:
        """Adds an error's problems; those without a field get `where`."""
        self.problems += [item if item.field else Problem(where, item.message) for item in error.problems]

    def _add(self, where: str, message: str) -> None:
        self.problems.append(Problem(where, message))


async def _spawn(sandbox: Sandbox, checks: str, spec: JobSpec, settings: Settings, reply_bytes: int) -> Child:
    """A child with the checks of a spec. Raises SandboxError."""
    limits = Limits(wall_s=DEADLINE_S, memory_mib=CHECK_MEMORY_MIB, reply_bytes=reply_bytes, low_priority=True)
    return await sandbox.spawn(checks, spec.model_dump_json(), settings.public(), limits=limits)


@asynccontextmanager
async def _acquired(semaphore: asyncio.Semaphore) -> AsyncIterator[None]:
    """Holds the semaphore. Raises AdmissionBusy when it was not free in time."""
    try:
        async with asyncio.timeout(QUEUE_TIMEOUT_S):
            await semaphore.acquire()
    except TimeoutError as error:
        raise AdmissionBusy("too many submissions are being checked: try again in a moment") from error
    try:
        yield
    finally:
        semaphore.release()


def _sources(spec: JobSpec) -> list[tuple[str, DataSourceSpec]]:
    held_out = [("eval", spec.data.eval)] if spec.data.eval is not None else []
    return [("train", spec.data.train), *held_out]
