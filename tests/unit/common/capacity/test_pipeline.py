"""The closed network against a simulation of every group by discrete events, and what holds for all networks."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.capacity.pipeline import Network, ServiceLaw, _Flow, steady_cycle
from tests.unit.common.capacity.discrete_events import Simulation

LAWS = {
    "capacity": ServiceLaw(0.0, 0.006, 24), "latency": ServiceLaw(0.2, 0.0, 24), "both": ServiceLaw(0.05, 0.004, 24),
}  # fmt: skip

NETWORKS = st.builds(
    Network,
    groups_per_step=st.integers(1, 64),
    max_off_policy_steps=st.integers(0, 4),
    accept_rate=st.floats(0.1, 1.0),
    learner_s=st.floats(0.05, 5.0),
    law=st.builds(
        ServiceLaw, alone_s=st.floats(0.001, 1.0), per_group_s=st.floats(0.001, 0.1), places=st.integers(1, 32)
    ),
    servers=st.integers(1, 8),
    sync_s=st.floats(0.0, 0.2),
    takes_turns=st.booleans(),
)


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("law", sorted(LAWS))
@pytest.mark.parametrize("takes_turns", [False, True])
def test_it_agrees_with_a_simulation_of_every_group(law: str, bound: int, servers: int, takes_turns: bool) -> None:
    network = Network(32, bound, 0.6, 0.3, LAWS[law], servers, sync_s=0.03, pause_s=0.01, takes_turns=takes_turns)
    cycle = steady_cycle(network)
    period_s, servers_idle, learner_idle, age_mean, age_max = Simulation(network, random.Random(1)).run(60)
    assert cycle.period_s == pytest.approx(period_s, rel=0.08)
    assert 1 - cycle.busy_server_s / (servers * cycle.period_s) == pytest.approx(servers_idle, abs=0.1)
    assert cycle.wait_s / cycle.period_s == pytest.approx(learner_idle, abs=0.08)
    loose = (
        2.5 if takes_turns and bound > 2 else 1.0
    )  # where most slots wait through every turn, the flow's ages are too high
    assert cycle.age_sum / 32 == pytest.approx(age_mean, abs=0.2 * loose)
    assert cycle.age_max == pytest.approx(age_max, abs=0.3 * loose)


def test_the_synchronous_mode_adds_both_sides_up() -> None:
    """One place, so that nothing overlaps: 10 groups of 0.1 s one after the other, then the learner."""
    network = Network(10, 0, 1.0, 2.0, ServiceLaw(0.1, 0.0, 1), servers=1)
    assert steady_cycle(network).period_s == pytest.approx(2.0 + 10 * 0.1, rel=0.03)


def test_taking_turns_adds_both_sides_up_whatever_the_bound() -> None:
    law = ServiceLaw(0.0, 0.02, 8)
    sampling_s = steady_cycle(Network(16, 2, 0.5, 0.001, law, servers=1)).period_s
    turns = Network(16, 2, 0.5, 2.0, law, servers=1, takes_turns=True)
    assert steady_cycle(turns).period_s == pytest.approx(2.0 + sampling_s, rel=0.02)


def test_a_server_that_is_full_gives_its_capacity() -> None:
    network = Network(16, 8, 0.5, 0.01, ServiceLaw(0.0, 0.02, 8), servers=2)
    assert steady_cycle(network).period_s == pytest.approx(16 / 0.5 * 0.02 / 2, rel=0.01)


def test_a_pause_takes_its_time_from_servers_that_are_full() -> None:
    network = Network(16, 2, 1.0, 0.01, ServiceLaw(0.0, 0.02, 8), servers=1)
    slower_s = steady_cycle(replace(network, sync_s=0.1, pause_s=0.1)).period_s - steady_cycle(network).period_s
    assert slower_s == pytest.approx(0.1, rel=0.05)


@given(NETWORKS)
@settings(max_examples=30, deadline=None)
def test_what_comes_in_goes_out_or_is_ready(network: Network) -> None:
    flow, steps = _Flow(network), 30
    came = sum(flow.next_cycle().trained for _ in range(steps))
    assert came == pytest.approx(steps * network.groups_per_step + sum(flow.ready.values()), rel=1e-6)


# The same networks each time: the bounds are those of the fluid limit, which a network of few groups may miss by a little more.
@given(NETWORKS)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_shares_are_shares_and_rates_are_within_their_bounds(network: Network) -> None:
    cycle = steady_cycle(network)
    assert cycle.trained == pytest.approx(network.accept_rate * cycle.sampled, rel=1e-6)
    assert cycle.period_s == pytest.approx(network.learner_s + cycle.wait_s, rel=1e-6)
    assert 0.0 <= cycle.wait_s / cycle.period_s <= 1.0
    assert 0.0 <= cycle.busy_server_s <= network.servers * cycle.period_s * (1 + 1e-9)
    assert 0.0 <= cycle.age_sum / network.groups_per_step <= network.max_off_policy_steps * 1.01
    rate = network.places / network.law.group_s(network.places, network.servers)
    assert cycle.period_s >= 0.98 * (network.groups_per_step - 1) / (network.accept_rate * rate)


@given(NETWORKS)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_more_servers_are_never_slower(network: Network) -> None:
    periods = [steady_cycle(replace(network, servers=servers)).period_s for servers in (1, 2, 4, 8)]
    for fewer, more in pairwise(periods):
        assert more <= fewer * 1.03


@given(NETWORKS)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_looser_bound_is_never_slower(network: Network) -> None:
    periods = [steady_cycle(replace(network, max_off_policy_steps=bound)).period_s for bound in (0, 1, 2, 4)]
    for tighter, looser in pairwise(periods):
        assert looser <= tighter * 1.05
