"""Pipeline of a job as a closed network: slots circulate between the rollout servers and the learner.

    ┌─ held until the servers have the version ─► servers (n, C places each) ─► informative? ─► ready ─► learner (B at once) ─┐
    └──────────────────────────────────────────────◄ no: its slot is issued again                        B slots at publish ◄─┘

B = groups_per_step, k = max_off_policy_steps, N = (k + 1)·B slots, p = share of informative groups, D = the learner's own seconds
of a step, n = servers. The number of groups in the network never exceeds N (`learner/groups/off_policy.py`), so it is a closed queueing
network (Gordon and Newell 1967; bounds and mean values: Lazowska, Zahorjan, Graham and Sevcik, "Quantitative System Performance", 1984,
chapters 5 to 8). The learner serves in batches, so there is no product form; but the learner's service hardly varies, and the network
has one cycle, from one publish to the next, whose state is one number, x: groups at the servers when a version is published.

1. At the publish B slots are free and B groups are issued: x + B are in flight, r = N − B − x are ready.
2. With m groups in flight at n servers each has c = min(m/n, C) in service. A group takes `alone_s` + `per_group_s`·c seconds, as an
   engine with continuous batching does whose iteration costs a fixed part and a part for each sequence (Orca, OSDI 2022). By Little's law
   (1961) n servers end n·c / (alone_s + per_group_s·c) groups a second, of which the share p becomes ready: dm/dt = −p·rate(m).
3. The next step begins as soon as r ≥ B, that is m ≤ k·B, at once where that holds at the publish; D seconds later it is published.
   Step 2 goes on meanwhile: m at that moment is the next x. The period is T = wait + D.

x → next x is monotone, and its fixed point is the steady state. Bounds that it meets: T ≥ D, and T ≥ B / (p · rate(N)). With k = 0 all B groups must be in before a step, none is sampled during it, and T = D + wait: the synchronous mode.

policy_age: servers and learner take groups in the order of issue. A group whose sampling begins behind a others that will be trained is in
batch ⌈(a + 1)/B⌉ from then on, and ages by one at each publish before that batch is chosen; k bounds it.

Not covered: randomness near the balance of both sides (the model is up to some per cent too quick there, more with k = 1), groups that
overtake each other by more than a step, and time in the reward service.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_CYCLES = 500
"""Cycles after which the state counts as steady."""
TOLERANCE = 1e-6
"""Change of x, as a share of the slots, at which it does."""
BURST_PARTS = 16
"""Parts in which groups that begin together are counted, each with its own policy_age."""
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class ServiceLaw:
    """Seconds that a rollout server takes for a group, against the number of groups that it samples at once."""

    alone_s: float
    """Part that is the same for any number at once."""
    per_group_s: float
    """Part that each group at once adds."""
    places: int
    """Most groups at once (`max_concurrent_groups`)."""

    def rate(self, in_flight: float, servers: int) -> float:
        """Groups per second that `servers` servers end together, with so many groups in flight, spread evenly."""
        at_once = min(max(in_flight / servers, 1.0), self.places)
        return min(in_flight, servers) * at_once / (self.alone_s + self.per_group_s * at_once)


@dataclass(frozen=True, slots=True)
class Network:
    """One job's network."""

    groups_per_step: int
    max_off_policy_steps: int
    accept_rate: float
    """Share of sampled groups that are trained, above 0 and up to 1."""
    learner_s: float
    """The learner's own seconds of a step, above 0: all but its wait for the batch."""
    law: ServiceLaw
    servers: int
    sync_s: float = 0.0
    """From a publish until the servers sample with the version."""
    pause_s: float = 0.0
    """The end of that time, in which nothing is sampled."""

    @property
    def slots(self) -> int:
        """Active-group budget."""
        return (self.max_off_policy_steps + 1) * self.groups_per_step

    @property
    def places(self) -> int:
        """Groups in service at most, over all servers."""
        return self.servers * self.law.places


@dataclass(slots=True)
class Cycle:
    """One cycle, from a publish to the next: totals that grow while it runs."""

    in_flight: float
    """Groups at the servers at its end."""
    period_s: float = 0.0
    wait_s: float = 0.0
    """The learner's."""
    trained: float = 0.0
    """Informative groups that came in, equal to groups_per_step in the steady state."""
    busy_server_s: float = 0.0
    """Seconds with at least one group, summed over the servers."""
    age_sum: float = 0.0
    """policy_age, summed over the groups whose sampling began."""
    started: float = 0.0
    """Groups whose sampling began."""
    age_max: int = 0


def steady_cycle(network: Network) -> Cycle:
    """The cycle that repeats itself."""
    in_flight = float(network.slots - network.groups_per_step)
    for _ in range(MAX_CYCLES):
        cycle = _Run(network, in_flight).to_publish()
        if abs(cycle.in_flight - in_flight) <= TOLERANCE * network.slots:
            break
        in_flight = cycle.in_flight
    return cycle


@dataclass(slots=True)
class _Run:
    """Run of one cycle, from completion to completion."""

    network: Network
    in_flight: float
    """Groups that servers may work on now."""
    held: float = field(init=False)
    """Groups that wait for the servers' sync."""
    ready: float = field(init=False)
    published_at: float | None = None
    """End of the step under way; None while the learner waits."""
    cycle: Cycle = field(init=False)

    def __post_init__(self) -> None:
        per_step = self.network.groups_per_step
        self.held, self.ready = float(per_step), self.network.slots - per_step - self.in_flight
        self.cycle = Cycle(self.in_flight)

    def to_publish(self) -> Cycle:
        """The whole cycle."""
        while True:
            if self.held and self.cycle.period_s >= self.network.sync_s - _EPSILON:
                self._release()
            if self.published_at is None and self.ready >= self.network.groups_per_step - _EPSILON:
                self.ready -= self.network.groups_per_step
                self.published_at = self.cycle.period_s + self.network.learner_s
            if self.published_at is not None and self.cycle.period_s >= self.published_at - _EPSILON:
                break
            self._advance()
        self.cycle.in_flight = self.in_flight + self.held
        return self.cycle

    def _release(self) -> None:
        """The servers have the version: they begin with the groups that were held for it, as far as there are places."""
        before = min(self.in_flight, self.network.places)
        self.in_flight, self.held = self.in_flight + self.held, 0.0
        after = min(self.in_flight, self.network.places)
        for part in range(BURST_PARTS):
            share = (after - before) / BURST_PARTS
            self._count_starts(share, before + (part + 0.5) * share, late=False)

    def _advance(self) -> None:
        """To the next completion, sync, or publish, whichever is first."""
        network, cycle = self.network, self.cycle
        ends = [self.published_at] if self.published_at is not None else []
        if self.held:
            pause_at = network.sync_s - network.pause_s
            ends.append(pause_at if cycle.period_s < pause_at - _EPSILON else network.sync_s)
        paused = bool(self.held) and cycle.period_s >= network.sync_s - network.pause_s - _EPSILON
        rate = 0.0 if paused else network.accept_rate * network.law.rate(self.in_flight, network.servers)
        amount = min(1.0, self.in_flight)
        if self.published_at is None:
            amount = min(amount, network.groups_per_step - self.ready)
        seconds = min([end - cycle.period_s for end in ends] + ([amount / rate] if rate > 0.0 else []))
        amount = min(amount, rate * seconds)
        self._account(seconds, amount)

    def _account(self, seconds: float, amount: float) -> None:
        """Counts an interval in which `amount` groups became ready."""
        network, cycle = self.network, self.cycle
        in_service = min(self.in_flight, network.places)
        sampled = amount / network.accept_rate
        queued = self.in_flight > network.places
        self._count_starts(sampled if queued else sampled - amount, in_service, late=queued and bool(self.held))
        cycle.busy_server_s += seconds * min(self.in_flight, network.servers)
        cycle.wait_s += seconds if self.published_at is None else 0.0
        cycle.period_s += seconds
        cycle.trained += amount
        self.in_flight -= amount
        self.ready += amount

    def _count_starts(self, count: float, in_service: float, *, late: bool) -> None:
        """Counts groups whose sampling begins now. `late`: with the version before the published one."""
        network, cycle = self.network, self.cycle
        if count <= 0.0:
            return
        ahead = self.ready + network.accept_rate * in_service
        batch = max(1, math.ceil(ahead / network.groups_per_step - _EPSILON))
        publishes = batch + late - (self.published_at is None)
        age = min(publishes, network.max_off_policy_steps)
        cycle.age_sum += count * age
        cycle.age_max = max(cycle.age_max, age)
        cycle.started += count
