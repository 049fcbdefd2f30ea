"""Simulation of a job by discrete events: every group alone, with random work, under the learner's own rules for slots and ages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from services.common.capacity.pipeline import Network
from services.learner.groups.off_policy import issue_budget, select_batch

SHAPE = 6.0
"""Of the gamma distribution of a group's work: its standard deviation is 0.41 of the mean."""


@dataclass
class Group:
    ordinal: int
    issue_version: int
    work: float
    """Left, in units of a mean group's."""
    start_version: int = -1


@dataclass
class Simulation:
    network: Network
    random: random.Random
    now: float = 0.0
    version: int = 0
    published_at: dict[int, float] = field(default_factory=lambda: {0: -1e9})
    queue: list[Group] = field(default_factory=list)
    servers: list[list[Group]] = field(default_factory=list)
    ready: dict[int, Group] = field(default_factory=dict)
    issued: int = 0
    step_ends: float | None = None
    ages: list[int] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    busy_s: float = 0.0
    wait_s: float = 0.0

    def run(self, steps: int, warm_up: int = 10) -> tuple[float, float, float, float, float]:
        """Period, seconds; idle shares of servers and learner; mean policy_age, mean of each step's oldest group."""
        self.servers = [[] for _ in range(self.network.servers)]
        began = 0.0
        while self.version < steps + warm_up:
            if self.version == warm_up and not began:
                began, self.busy_s, self.wait_s = self.now, 0.0, 0.0
                self.ages, self.oldest = [], []
            self.act()
            self.advance()
        span = self.now - began
        idle = 1.0 - self.busy_s / (span * self.network.servers)
        return (
            span / steps, idle, self.wait_s / span, sum(self.ages) / len(self.ages), sum(self.oldest) / len(self.oldest)
        )  # fmt: skip

    def held_version(self) -> int:
        """The newest version that the servers have."""
        return max(v for v, at in self.published_at.items() if at + self.network.sync_s <= self.now + 1e-12)

    def act(self) -> None:
        """All that takes no time: the choice of a batch, issues, starts."""
        network = self.network
        in_flight = [*self.queue, *(group for server in self.servers for group in server)]
        if self.step_ends is None:
            chosen = select_batch(
                {o: self.version - g.start_version for o, g in self.ready.items()},
                [self.version - g.issue_version for g in in_flight],
                groups_per_step=network.groups_per_step, max_off_policy_steps=network.max_off_policy_steps, partial=False,
            )  # fmt: skip
            if chosen is not None:
                ages = [self.version - self.ready.pop(ordinal).start_version for ordinal in chosen]
                self.ages += ages
                self.oldest.append(max(ages))
                self.step_ends = self.now + network.learner_s
        budget = issue_budget(
            active=len(in_flight) + len(self.ready), ready=len(self.ready), groups_per_step=network.groups_per_step,
            max_off_policy_steps=network.max_off_policy_steps, accept_rate=network.accept_rate,
            still_needed=10**9, step_under_way=self.step_ends is not None,
        )  # fmt: skip
        for _ in range(budget):
            self.queue.append(Group(self.issued, self.version, self.random.gammavariate(SHAPE, 1 / SHAPE)))
            self.issued += 1
        held = self.held_version()
        while self.queue and self.queue[0].issue_version <= held:
            server = min(self.servers, key=len)
            if len(server) >= network.law.places:
                break
            group = self.queue.pop(0)
            group.start_version = held
            server.append(group)

    def advance(self) -> None:
        """To the next completion, sync or end of a step."""
        law, sync_s = self.network.law, self.network.sync_s
        paused = self.held_version() < self.version and (
            self.now >= self.published_at[self.version] + sync_s - self.network.pause_s - 1e-12
        )
        held = self.network.takes_turns and self.step_ends is not None
        pace = [0.0 if paused or held else 1.0 / (law.alone_s + law.per_group_s * max(1, len(s))) for s in self.servers]
        ends = [at + sync_s - part for at in self.published_at.values() for part in (0.0, self.network.pause_s)]
        times = [end - self.now for end in ends if end > self.now + 1e-12]
        times += [
            group.work / rate for server, rate in zip(self.servers, pace, strict=True) if rate for group in server
        ]
        times += [self.step_ends - self.now] if self.step_ends is not None else []
        seconds = max(0.0, min(times))
        for server, rate in zip(self.servers, pace, strict=True):
            self.busy_s += seconds * (bool(server) and not held)
            for group in list(server):
                group.work -= rate * seconds
                if group.work <= 1e-9:
                    server.remove(group)
                    if self.random.random() < self.network.accept_rate:
                        self.ready[group.ordinal] = group
        self.wait_s += seconds * (self.step_ends is None)
        self.now += seconds
        if self.step_ends is not None and self.now >= self.step_ends - 1e-12:
            self.step_ends = None
            self.version += 1
            self.published_at = {v: at for v, at in self.published_at.items() if v > self.version - 8}
            self.published_at[self.version] = self.now
