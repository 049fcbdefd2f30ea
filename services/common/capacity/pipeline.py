"""Pipeline of a job as a closed network: slots circulate between the rollout servers and the learner.

    ┌─► queue ─► servers (n, C places each) ─► informative? ─► ready ─► learner (B at once) ─┐
    └────◄───────────── no: its slot is issued again ◄──────────── B slots at the publish ◄──┘

B = groups_per_step, k = max_off_policy_steps, N = (k + 1)·B slots, p = share of informative groups, D = the learner's own seconds of a
step, n = servers. The slots bound the groups in the network, so it is a closed queueing network (Gordon and Newell 1967; Lazowska and
others, "Quantitative System Performance", 1984). It has no product form: the learner takes batches, and waits for stragglers. Its
means are followed in time, as amounts of groups that flow (the fluid limit), from one publish to the next, until a cycle repeats:

1. At a publish B slots are free and B groups are issued; each group that is not informative is issued again at once. A task names the
   newest version, and a server takes it when it has that version, `sync_s` after the publish.
2. With m groups in service, c = m/n ≤ C at each server, each advances by 1 / (alone_s + per_group_s·c) a second: an engine with continuous
   batching has iterations that cost a fixed part and a part for each sequence (Orca, OSDI 2022). Work varies: a group passes STAGES stages,
   and its standard deviation is 0.4 of the mean (method of stages, Erlang 1917).
3. A step begins when B groups are ready and no other would become older than k: after it at most (k − j)·B groups of age j or more may
   remain (`learner/groups/off_policy.py`, rule 2). The last of B random times comes when the expected number still out is e^−γ = 0.56
   (Gumbel). D seconds later the step is published.

Little's law and the bounds T ≥ D and T ≥ B / (p · rate) of the period T follow; with k = 0 nothing is sampled during a step and the two
sides add up. A group's policy_age is the number of publishes since it was begun, as that is what the flow carries.

Not covered: chance near the balance of both sides (there a run is some per cent slower), other distributions of a group's work, and time in
the reward service. A run's policy_age counts from a group's first token, the model's from its start: the model's is a little higher.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STAGES = 3
ADVANCE = 0.5
"""Share of a stage's groups that leave it in one time step. Variance of work ÷ mean²: (1 − ADVANCE) / STAGES."""
STRAGGLERS = 0.56
"""Expected number of groups still out at the moment at which the last one comes in, on average."""
MAX_CYCLES = 150
MEAN_OVER = 8
"""Last cycles, over which the figures are means: a steady state may alternate."""
TOLERANCE = 1e-3
"""Change of a cycle's figures, as a share, at which the state counts as steady."""
_EPSILON = 1e-9
_NOTHING = 1e-3
"""Groups; fewer in service count as none."""


@dataclass(frozen=True, slots=True)
class ServiceLaw:
    """Seconds that a rollout server takes for a group, against the number of groups that it samples at once."""

    alone_s: float
    """Part that is the same for any number at once."""
    per_group_s: float
    """Part that each group at once adds."""
    places: int
    """Most groups at once (`max_concurrent_groups`)."""

    def group_s(self, in_service: float, servers: int) -> float:
        """Seconds of a group while so many are in service, spread evenly over the servers."""
        return self.alone_s + self.per_group_s * min(max(in_service / servers, 1.0), self.places)


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
    takes_turns: bool = False
    """Whether nothing is sampled while a step is trained: groups in service stay where they are."""

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
    """One cycle, from a publish to the next, or the mean of some."""

    period_s: float = 0.0
    wait_s: float = 0.0
    """The learner's."""
    sampled: float = 0.0
    """Groups that servers ended."""
    trained: float = 0.0
    """Informative ones among them, equal to groups_per_step in the steady state."""
    busy_server_s: float = 0.0
    """Seconds with a group in service, summed over the servers."""
    age_sum: float = 0.0
    """policy_age, summed over the step's groups."""
    age_max: float = 0.0
    """Of the oldest group."""

    def add(self, other: Cycle, share: float) -> None:
        """Adds a share of another cycle."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + share * getattr(other, name))


def steady_cycle(network: Network) -> Cycle:
    """The cycle that repeats itself."""
    flow, last = _Flow(network), deque[Cycle](maxlen=MEAN_OVER)
    state, calm = (0.0, 0.0, 0.0), 0
    for _ in range(MAX_CYCLES):
        last.append(flow.next_cycle())
        before, state = state, (last[-1].period_s, flow.in_flight, last[-1].age_sum)
        steady = all(abs(a - b) <= TOLERANCE * max(a, b) + _EPSILON for a, b in zip(before, state, strict=True))
        calm = calm + 1 if steady else 0
        if calm == MEAN_OVER:
            break
    mean = Cycle()
    for cycle in last:
        mean.add(cycle, 1.0 / len(last))
    return mean


@dataclass(slots=True)
class _Flow:
    """Amounts of groups in each place, followed in time."""

    network: Network
    version: int = 0
    since_publish_s: float = 0.0
    step_ends_s: float | None = None
    """On the same clock; None while the learner waits."""
    queue: deque[list[float]] = field(default_factory=deque)
    """[version at issue, groups], oldest first."""
    service: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """(version at issue, version that samples) → groups in each stage."""
    ready: dict[int, float] = field(default_factory=dict)
    """Version that sampled → groups; below 0 by the stragglers that a step took before they came."""
    cycle: Cycle = field(default_factory=Cycle)

    def __post_init__(self) -> None:
        self.queue.append([0, float(self.network.slots)])
        self.since_publish_s = self.network.sync_s

    @property
    def in_service(self) -> float:
        """Groups that servers work on."""
        return sum(map(sum, self.service.values()))

    @property
    def in_flight(self) -> float:
        """Groups that are issued and not ready."""
        return self.in_service + sum(amount for _, amount in self.queue)

    def next_cycle(self) -> Cycle:
        """Follows the flow to the next publish."""
        self.cycle = Cycle()
        while True:
            self._start()
            if self.step_ends_s is None and self._may_begin():
                self._begin_step()
            if self.step_ends_s is not None and self.since_publish_s >= self.step_ends_s - _EPSILON:
                self._publish()
                return self.cycle
            self._advance()

    def _publish(self) -> None:
        self.version += 1
        self.since_publish_s, self.step_ends_s = 0.0, None
        self.queue.append([self.version, float(self.network.groups_per_step)])

    @property
    def _held(self) -> int:
        """The newest version that the servers have."""
        return self.version - (self.since_publish_s < self.network.sync_s - _EPSILON)

    def _start(self) -> None:
        """Moves groups from the queue to free places."""
        free, held = self.network.places - self.in_service, self._held
        while self.queue and free > _EPSILON and self.queue[0][0] <= held:
            issue, amount = self.queue[0]
            taken = min(amount, free)
            self.service.setdefault((int(issue), held), [0.0] * STAGES)[0] += taken
            free -= taken
            if taken < amount:
                self.queue[0][1] -= taken
            else:
                self.queue.popleft()

    def _may_begin(self) -> bool:
        """Whether a batch is ready, and what then remains can still be trained in time."""
        per_step, bound = self.network.groups_per_step, self.network.max_off_policy_steps
        if sum(self.ready.values()) < per_step - STRAGGLERS:
            return False
        if self.in_flight <= STRAGGLERS:
            return True
        left = {version: amount for version, amount in self._split(per_step)[1].items() if amount > _EPSILON}
        in_flight = {int(issue): 0.0 for issue, _ in self.queue} | {issue: 0.0 for issue, _ in self.service}
        for issue, amount in self.queue:
            in_flight[int(issue)] += amount
        for (issue, _), stages in self.service.items():
            in_flight[issue] += sum(stages)
        remain = 0.0
        for version in sorted({*left, *in_flight}):
            remain += left.get(version, 0.0) + in_flight.get(version, 0.0)
            age = self.version - version
            if age > 0 and remain > max(bound - age, 0) * per_step + STRAGGLERS:
                return False
        return True

    def _split(self, count: float) -> tuple[dict[int, float], dict[int, float]]:
        """The `count` oldest ready groups, and the others; a lack is taken from the newest."""
        taken, left = {}, {}
        newest = max(self.ready)
        for version in sorted(self.ready):
            taken[version] = count if version == newest else min(self.ready[version], count)
            left[version] = self.ready[version] - taken[version]
            count -= taken[version]
        return taken, left

    def _begin_step(self) -> None:
        taken, left = self._split(self.network.groups_per_step)
        # What a step took before it came is in no version: the ages are those of the others.
        share = self.network.groups_per_step / sum(max(amount, 0.0) for amount in taken.values())
        for version, amount in taken.items():
            # A straggler that an earlier step counted may still be here: no whole group is older than the bound.
            age = min(self.version - version, self.network.max_off_policy_steps)
            self.cycle.age_sum += age * share * max(amount, 0.0)
            if amount >= STRAGGLERS:
                self.cycle.age_max = max(self.cycle.age_max, age)
        self.ready = {version: amount for version, amount in left.items() if abs(amount) > _EPSILON}
        self.step_ends_s = self.since_publish_s + self.network.learner_s

    def _advance(self) -> None:
        """One time step: at most to the next sync, pause, or publish."""
        network, now, busy = self.network, self.since_publish_s, self.in_service
        syncing = now < network.sync_s - _EPSILON
        paused = syncing and now >= network.sync_s - network.pause_s - _EPSILON
        group_s = network.law.group_s(busy, network.servers)
        held = network.takes_turns and self.step_ends_s is not None
        ends = [] if self.step_ends_s is None else [self.step_ends_s]
        if syncing:
            ends.append(network.sync_s if paused else network.sync_s - network.pause_s)
        works = not paused and not held and busy > _NOTHING
        seconds = min([end - now for end in ends] + ([ADVANCE * group_s / STAGES] if works or not ends else []))
        if works:
            self._serve(STAGES * seconds / group_s)
        self.cycle.busy_server_s += 0.0 if held else seconds * min(busy, network.servers)
        self.cycle.wait_s += seconds if self.step_ends_s is None else 0.0
        self.cycle.period_s += seconds
        self.since_publish_s += seconds

    def _serve(self, share: float) -> None:
        """Moves a share of each stage's groups to the next; from the last one they are ready, or issued again."""
        again = 0.0
        for (_, sampled_by), stages in self.service.items():
            moved = [share * amount for amount in stages]
            for stage, amount in enumerate(moved):
                stages[stage] -= amount
                if stage + 1 < STAGES:
                    stages[stage + 1] += amount
            informative = self.network.accept_rate * moved[-1]
            again += moved[-1] - informative
            self.ready[sampled_by] = self.ready.get(sampled_by, 0.0) + informative
            self.cycle.sampled += moved[-1]
            self.cycle.trained += informative
        if again > 0.0:
            if self.queue and self.queue[-1][0] == self.version:
                self.queue[-1][1] += again
            else:
                self.queue.append([self.version, again])
        self.service = {key: stages for key, stages in self.service.items() if sum(stages) > _EPSILON}
