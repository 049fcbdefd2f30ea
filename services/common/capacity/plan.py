"""Plan of a job: forecasts for numbers of rollout servers, each with the range that its run leaves open.

They suppose that every server has a device of its own, and that servers and learner are as quick as they were in the run: on a machine
where they share cores, the sharing is in the rates already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from services.common.capacity.pipeline import Network, steady_cycle
from services.common.capacity.rates import Rates
from services.common.spec.job import JobSpec

IDLE = 0.05
"""A side that is idle for a smaller share of the time is the limit."""
BALANCED = 0.95
"""Share of the speed with any number of servers at which servers and learner count as balanced."""


class Limit(StrEnum):
    """The side that limits a job."""

    SERVERS = "servers"
    LEARNER = "learner"
    SLOTS = "slots"
    """Each side waits for the other: more max_off_policy_steps would let both work."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One job with so many servers."""

    steps_per_h: float
    samples_per_s: float
    """Trained sequences."""
    tokens_per_s: float
    """Response tokens sampled, of all servers."""
    servers_idle: float
    """Share of the time in which a server has no group, mean over the servers."""
    learner_idle: float
    """Share of the time in which the learner waits for a batch."""
    policy_age_mean: float
    policy_age_max: int
    limit: Limit


@dataclass(frozen=True, slots=True)
class Row:
    """Forecasts for one number of servers; they differ where the run does not show how servers behave then."""

    servers: int
    capacity: Forecast
    """If a group costs a server's capacity alone."""
    latency: Forecast
    """If a group takes the same time whatever is sampled beside it."""

    @property
    def both(self) -> tuple[Forecast, Forecast]:
        """The slower one first."""
        slow, fast = sorted((self.capacity, self.latency), key=lambda forecast: forecast.steps_per_h)
        return slow, fast


@dataclass(frozen=True, slots=True)
class Plan:
    """Forecasts of a job, and the rates that they follow from."""

    rates: Rates
    rows: tuple[Row, ...]
    balanced: tuple[int, int]
    """Fewest servers at BALANCED of the speed with any number of them: the smaller and the larger of the two forecasts' numbers."""


def make_plan(rates: Rates, measured: JobSpec, planned: JobSpec, servers: Sequence[int]) -> Plan:
    """Forecasts for a job of the spec `planned`, from the rates of a run of `measured`.

    Of the two specs groups_per_step, max_off_policy_steps and max_concurrent_groups may differ; the learner's time of a step is taken to
    be in proportion to its groups.
    """
    per_step = measured.algorithm.groups_per_step
    scale = planned.algorithm.groups_per_step / per_step
    networks = [
        Network(
            groups_per_step=planned.algorithm.groups_per_step,
            max_off_policy_steps=planned.off_policy.max_off_policy_steps,
            accept_rate=rates.accept_rate,
            learner_s=rates.learner_s * scale,
            law=law,
            servers=1,
            sync_s=rates.sync_s,
            pause_s=min(rates.pause_s, rates.sync_s),
        )
        for law in rates.laws(planned.rollout.max_concurrent_groups)
    ]
    first, second = (_balance(network) for network in networks)
    rows = tuple(
        Row(count, *(forecast(rates, replace(network, servers=count)) for network in networks)) for count in servers
    )
    return Plan(rates, rows, (min(first, second), max(first, second)))


def forecast(rates: Rates, network: Network) -> Forecast:
    """The steady state of one network, in the units that people read."""
    cycle = steady_cycle(network)
    per_s = network.groups_per_step / cycle.period_s
    servers_idle = max(0.0, 1.0 - cycle.busy_server_s / (network.servers * cycle.period_s))
    learner_idle = cycle.wait_s / cycle.period_s
    return Forecast(
        steps_per_h=3600.0 / cycle.period_s,
        samples_per_s=per_s * rates.samples_per_group,
        tokens_per_s=per_s / network.accept_rate * rates.tokens_per_group,
        servers_idle=servers_idle,
        learner_idle=learner_idle,
        policy_age_mean=cycle.age_sum / cycle.started if cycle.started else 0.0,
        policy_age_max=cycle.age_max,
        limit=_limit(servers_idle, learner_idle),
    )


def _limit(servers_idle: float, learner_idle: float) -> Limit:
    if learner_idle <= IDLE:
        return Limit.LEARNER
    return Limit.SERVERS if servers_idle <= IDLE else Limit.SLOTS


def _balance(network: Network) -> int:
    """Fewest servers at BALANCED of the speed with one for each slot, more than which change nothing; by bisection."""
    enough_s = steady_cycle(replace(network, servers=network.slots)).period_s / BALANCED
    low, high = 0, network.slots
    while high - low > 1:
        middle = (low + high) // 2
        if steady_cycle(replace(network, servers=middle)).period_s <= enough_s:
            high = middle
        else:
            low = middle
    return high
