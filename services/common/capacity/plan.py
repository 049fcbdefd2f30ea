"""Plan of a job: forecasts for numbers of rollout servers, each with the range that its run leaves open.

They suppose that every server has a device of its own, and that servers and learner are as quick as they were in the run: on a machine
where they share cores, the sharing is in the rates already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from services.common.capacity.pipeline import Network, steady_cycle
from services.common.capacity.rates import Rates
from services.common.differences import differences
from services.common.errors import ConfigError
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec, problems_of

IDLE = 0.05
"""A side that is idle for a smaller share of the time is the limit."""
BALANCED = 0.95
"""Share of the speed with any number of servers at which servers and learner count as balanced."""

PLANNABLE = (
    "off_policy.max_off_policy_steps",
    "algorithm.filter_groups_train_batch_size",
    "rollout.max_concurrent_groups",
)
"""Settings whose effect follows from the rates; any other may change the rates themselves."""
SLACK = 3.0
"""Largest factor by which the seconds of groups are corrected, so that the network gives the measured period."""
BISECTIONS = 12
DEFAULT_COUNTS = (1, 2, 4, 8, 16, 32, 64)


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
class Colocated:
    """Forecasts for the run's own servers and learner if they take turns on the devices of both (`placement.rollout: colocated`)."""

    slow: Forecast
    """If neither is quicker on more devices."""
    fast: Forecast
    """If each is quicker in proportion to its devices."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Forecasts of a job, and the rates that they follow from."""

    rates: Rates
    rows: tuple[Row, ...]
    colocated: Colocated
    balanced: tuple[int, int]
    """Fewest servers at BALANCED of the speed with any number of them: the smaller and the larger of the two forecasts' numbers."""

    def as_record(self) -> dict[str, Any]:
        """JSON values: of every row the slower forecast and the faster one."""
        forecasts = [
            {
                "servers": row.servers,
                **{name: asdict(item) for name, item in zip(("slow", "fast"), row.both, strict=True)},
            }
            for row in self.rows
        ]
        rates = asdict(self.rates) | {
            "accept_rate": self.rates.accept_rate,
            "samples_per_s": self.rates.samples_per_s,
            "tokens_per_s": self.rates.tokens_per_s,
        }
        return {
            "rates": rates,
            "balanced": list(self.balanced),
            "forecasts": forecasts,
            "colocated": asdict(self.colocated),
        }


def planned_spec(recorded: JobSpec, document: dict[str, Any]) -> JobSpec:
    """The spec in a changed document of the recorded one.

    Raises:
        ConfigError: an unknown key or a wrong value (names the field), or a setting that is not in PLANNABLE.
    """
    try:
        planned = JobSpec.model_validate(document, context=RECORDED)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, JobSpec, "--set ")) from error
    for path, _, _ in differences(recorded.model_dump(mode="json"), planned.model_dump(mode="json")):
        if path not in PLANNABLE:
            raise ConfigError(
                f"--set {path}: may change the rates, which only a run shows; a plan can change {', '.join(PLANNABLE)}"
            )
    return planned


def make_plan(rates: Rates, measured: JobSpec, planned: JobSpec, servers: Sequence[int] = ()) -> Plan:
    """Forecasts for a job of the spec `planned`, from the rates of a run of `measured`, which may differ in what is PLANNABLE.

    The learner's time of a step is taken to be in proportion to its groups. `servers`: the numbers to forecast; without any,
    DEFAULT_COUNTS up to twice the balanced number, that number, and the run's own.

    Raises:
        ConfigError: engine and learner took turns in the run: its rates are not those of either alone.
    """
    if measured.takes_turns:
        raise ConfigError(
            "placement.rollout: a plan follows from a run of separate engine and learner, and in this one they took turns"
        )
    networks = [_changed(_calibrated(network, rates), rates, planned) for network in _networks(rates, measured)]
    balanced = sorted(_balance(network) for network in networks)
    usual = {*balanced, rates.servers, *(count for count in DEFAULT_COUNTS if count <= 2 * balanced[1])}
    rows = [
        Row(count, *(forecast(rates, replace(network, servers=count)) for network in networks))
        for count in sorted(set(servers) or usual)
    ]
    return Plan(rates, tuple(rows), _colocated(rates, networks, planned), (balanced[0], balanced[1]))


def _colocated(rates: Rates, networks: Sequence[Network], planned: JobSpec) -> Colocated:
    """Of the two laws, the slower one without any gain and the faster one with the whole."""
    engines, ranks = rates.servers * planned.rollout.tensor_parallel_size, planned.world_size
    share = engines / (engines + ranks)
    turns = [replace(network, takes_turns=True) for network in networks]
    slow = [forecast(rates, network) for network in turns]
    fast = [
        forecast(rates, replace(_slowed(network, share), learner_s=network.learner_s * (1.0 - share)))
        for network in turns
    ]
    return Colocated(min(slow, key=lambda found: found.steps_per_h), max(fast, key=lambda found: found.steps_per_h))


def _networks(rates: Rates, measured: JobSpec) -> list[Network]:
    """The measured run, under each of the laws that the rates leave open."""
    return [
        Network(
            groups_per_step=measured.algorithm.groups_per_step,
            max_off_policy_steps=measured.off_policy.max_off_policy_steps,
            accept_rate=rates.accept_rate,
            learner_s=rates.learner_s,
            law=law,
            servers=rates.servers,
            sync_s=rates.sync_s,
            pause_s=min(rates.pause_s, rates.sync_s),
        )
        for law in rates.laws(measured.rollout.max_concurrent_groups)
    ]


def _calibrated(network: Network, rates: Rates) -> Network:
    """The network whose servers give the measured period; unchanged where the learner hides their speed.

    What the servers and streams do between two groups is in no group's seconds. It shows while the learner waits.
    """
    if rates.period_s - rates.learner_s <= IDLE * rates.period_s:
        return network
    low, high = 1.0 / SLACK, SLACK
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if steady_cycle(_slowed(network, middle)).period_s < rates.period_s:
            low = middle
        else:
            high = middle
    return _slowed(network, math.sqrt(low * high))


def _slowed(network: Network, factor: float) -> Network:
    law = replace(network.law, alone_s=network.law.alone_s * factor, per_group_s=network.law.per_group_s * factor)
    return replace(network, law=law)


def _changed(network: Network, rates: Rates, planned: JobSpec) -> Network:
    """The calibrated network with the planned spec's settings."""
    per_step = planned.algorithm.groups_per_step
    return replace(
        network,
        groups_per_step=per_step,
        max_off_policy_steps=planned.off_policy.max_off_policy_steps,
        learner_s=rates.learner_s * per_step / network.groups_per_step,
        law=replace(network.law, places=planned.rollout.max_concurrent_groups),
    )


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
        policy_age_mean=cycle.age_sum / network.groups_per_step,
        policy_age_max=round(cycle.age_max),
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
