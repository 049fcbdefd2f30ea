"""Named points between two side effects, at which a process can be told to die: `kill -9`, as a power cut would; or to stand still.

A point is a function of the real service and a side of it: `rank.journal.append:after`. The harness arms it with a file,
`<folder>/fail/<point>`, that says how many times it is passed over; the process that comes by then takes the file away and kills
itself. Unarmed points cost a look for a file.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class Site:
    """A function with a side effect."""

    service: str
    name: str
    target: str
    """`module:attribute` or `module:Class.attribute`, looked up where it is called."""

    @property
    def points(self) -> tuple[str, str]:
        """Its two fail points."""
        return f"{self.service}.{self.name}:{BEFORE}", f"{self.service}.{self.name}:{AFTER}"


_LEARNER, _CONSUMER = "services.learner", "services.common.streams.consumer:Consumer"
_STORE = "services.learner.storage.job_store:HeadStore"

SITES = (
    Site("rank", "streams.add", "services.common.streams.stream:add"),
    Site("rank", "consumer.read", f"{_CONSUMER}.read"),
    Site("rank", "consumer.ack", f"{_CONSUMER}.ack"),
    Site("rank", "journal.append", f"{_LEARNER}.storage.journal:Journal.append"),
    Site("rank", "journal.fsync", f"{_LEARNER}.storage.journal:os.fsync"),
    Site("rank", "ranks.train", f"{_LEARNER}.ranks.client:Ranks.train"),
    Site("rank", "ranks.weights", f"{_LEARNER}.ranks.client:Ranks.write_weights"),
    Site("rank", "ranks.save", f"{_LEARNER}.ranks.client:Ranks.save"),
    Site("rank", "ranks.saved", f"{_LEARNER}.ranks.client:Ranks.saved"),
    Site("rank", "publisher.publish", f"{_LEARNER}.weights.publisher:Publisher.publish"),
    Site("rank", "store.activate", f"{_STORE}.activate"),
    Site("rank", "store.update", f"{_STORE}.update"),
    Site("rank", "store.append_step", f"{_STORE}.append_step"),
    Site("rank", "store.event", f"{_STORE}.event"),
    Site("rank", "store.transition", f"{_STORE}.transition"),
    Site("rank", "store.retire", f"{_STORE}.retire"),
    Site("rank", "checkpoint.begin", f"{_LEARNER}.storage.checkpoints:CheckpointStore.begin"),
    Site("rank", "checkpoint.commit", f"{_LEARNER}.storage.checkpoints:CheckpointStore.commit"),
    Site("rank", "checkpoint.fsync_directory", f"{_LEARNER}.storage.checkpoints:fsync_directory"),
    Site("rank", "checkpoint.write_durably", f"{_LEARNER}.storage.checkpoints:write_durably"),
    Site("rank", "checkpoint.prune", f"{_LEARNER}.storage.checkpoints:CheckpointStore._prune"),
    Site("rollout", "consumer.read", f"{_CONSUMER}.read"),
    Site("rollout", "consumer.hop", f"{_CONSUMER}.hop"),
    Site("rollout", "weights.fetch", "services.rollout.weights.client:WeightReceiver.fetch"),
    Site("rollout", "weights.apply", "services.rollout.engine.update:WeightSwitch._apply"),
    Site("rollout", "weights.label", "services.rollout.engine.update:VersionLabel.change"),
    Site("rollout", "weights.report", "services.rollout.weights.client:WeightReceiver.report"),
    Site("reward", "consumer.read", f"{_CONSUMER}.read"),
    Site("reward", "consumer.hop", f"{_CONSUMER}.hop"),
)

TRAINING_SITES = (
    Site("training", "passes.collect", f"{_LEARNER}.training.passes:Passes.collect"),
    Site("training", "critic.update", f"{_LEARNER}.training.critic:Critic.update"),
    Site("training", "actor.update", f"{_LEARNER}.training.actor:Actor.update"),
)
"""Within a step of real ranks; scripted ones never come by."""

EPISODE_SITES = (
    Site("world", "player.reset", "services.environment.player:Player.reset"),
    Site("world", "player.step", "services.environment.player:Player.step"),
    Site("environment", "episode.reset", "services.environment.players:Episode.reset"),
    Site("environment", "episode.reply", "services.environment.server:_reply"),
    Site("environment", "episode.step", "services.environment.players:Episode.step"),
    Site("rollout", "episode.reset", "services.common.environments.client:_Episode.reset"),
    Site("rollout", "episode.step", "services.common.environments.client:_Episode.step"),
)
"""In mid-turn of an episode: in the environment's own process, in the service that plays it, and in the rollout server that samples it."""

POINTS = tuple(point for site in SITES for point in site.points)
TRAINING_POINTS = tuple(point for site in TRAINING_SITES for point in site.points)
EPISODE_POINTS = tuple(point for site in EPISODE_SITES for point in site.points)
AT_THE_END = tuple(point for point in POINTS if point.startswith(("rank.store.transition", "rank.store.retire")))
"""Points that a job passes when it ends (and `transition` when it begins to run)."""


def armed_file(folder: Path, point: str) -> Path:
    """The file that arms a point."""
    return folder / "fail" / point


def arm(folder: Path, point: str, passes: int = 0, delay_s: float = 0.0, *, stop: bool = False) -> Path:
    """Lets the process that comes by the point after so many passes kill itself there; the file is gone when one is about to.

    With a delay it goes on meanwhile, and dies wherever it is then. With `stop` it stands still instead (SIGSTOP).

    Raises:
        ValueError: there is no such point.
    """
    if point not in POINTS + TRAINING_POINTS + EPISODE_POINTS:
        raise ValueError(f"there is no fail point {point!r}")
    path = armed_file(folder, point)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    number = signal.SIGSTOP if stop else signal.SIGKILL
    temporary.write_text(f"{passes} {delay_s} {int(number)}")
    temporary.rename(path)
    return path


def install(service: str, folder: Path) -> None:
    """Wraps the service's sites in this process.

    Raises:
        AttributeError: a site is not where it was; names it.
    """
    for site in SITES + TRAINING_SITES + EPISODE_SITES:
        if site.service == service:
            _wrap(site, folder)


def _wrap(site: Site, folder: Path) -> None:
    module_name, _, path = site.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        if inspect.ismodule(getattr(owner, parent)):  # `os.fsync` as this one module sees it
            setattr(owner, parent, _Namespace(getattr(owner, parent)))
        owner = getattr(owner, parent)
    before, after = (_Point(armed_file(folder, point)) for point in site.points)
    setattr(owner, name, _wrapped(getattr(owner, name), before, after))


def _wrapped(function: Callable[..., Any], before: _Point, after: _Point) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **options: Any) -> Any:
            before.passed()
            result = await function(*args, **options)
            after.passed()
            return result

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        before.passed()
        result = function(*args, **options)
        after.passed()
        return result

    return call


class _Namespace:
    """A module's names, some of which may be replaced for one user of it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Point:
    """One armed or unarmed point of this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passes = 0

    def passed(self) -> None:
        """Dies here, if told to."""
        try:
            passes, delay_s, number = self._path.read_text().split()
        except FileNotFoundError:
            self._passes = 0
            return
        self._passes += 1
        if self._passes <= int(passes):
            return
        self._path.unlink(missing_ok=True)
        if float(delay_s):
            threading.Timer(float(delay_s), os.kill, (os.getpid(), int(number))).start()
        else:
            # To this thread, and not to the process: another thread would take the signal, and this one go on for a while.
            signal.pthread_kill(threading.get_ident(), int(number))
