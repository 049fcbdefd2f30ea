"""Plans: what follows from a run's rates, and what they leave open."""

from __future__ import annotations

import pytest

from services.common.capacity.plan import Limit, make_plan, planned_spec
from services.common.capacity.rates import measure
from services.common.errors import ConfigError
from tests.unit.common.capacity.step_records import records, spec


def test_a_plan_for_the_same_number_of_servers_is_the_run_itself() -> None:
    rates = measure(records())
    (row,) = make_plan(rates, spec(), spec(), [1]).rows
    for forecast in row.both:
        assert forecast.samples_per_s == pytest.approx(rates.samples_per_s, rel=0.02)
        assert forecast.tokens_per_s == pytest.approx(rates.tokens_per_s, rel=0.02)
        assert forecast.learner_idle == pytest.approx(0.6, abs=0.02)
        assert forecast.limit is Limit.SERVERS


def test_servers_that_stay_full_add_up_and_then_the_learner_limits() -> None:
    """One server needs 1 s for a step's groups and the learner 0.4 s: 2.5 servers' work."""
    plan = make_plan(measure(records()), spec(), spec(), [1, 2, 8])
    speeds = [row.capacity.steps_per_h for row in plan.rows]
    assert speeds == pytest.approx([3600, 7200, 9000], rel=0.05)
    assert [row.capacity.limit for row in plan.rows] == [Limit.SERVERS, Limit.SERVERS, Limit.LEARNER]
    assert 3 in plan.balanced


def test_a_run_in_which_the_learner_was_the_limit_still_shows_the_servers_speed() -> None:
    """The server had work for a quarter of the time only, which its tokens per second do not show."""
    rates = measure(records(wait_s=0.0, rollout_busy_s=0.25, generate_s_mean=0.25 * 24 / 40))
    (row,) = make_plan(rates, spec(), spec(off_policy={"max_off_policy_steps": 4}), [1]).rows
    assert row.capacity.limit is Limit.LEARNER
    assert row.capacity.servers_idle == pytest.approx(0.75, abs=0.05)


def test_what_one_run_leaves_open_is_a_range() -> None:
    """96 slots: eight servers have at most twelve groups each, and the run shows servers with 24 only."""
    slow, fast = make_plan(measure(records(wait_s=0.95)), spec(), spec(), [8]).rows[0].both
    assert fast.steps_per_h > 1.3 * slow.steps_per_h


def test_the_synchronous_mode_leaves_both_sides_idle() -> None:
    plan = make_plan(measure(records()), spec(), spec(off_policy={"max_off_policy_steps": 0}), [1])
    for forecast in plan.rows[0].both:
        assert forecast.limit is Limit.SLOTS
        assert forecast.policy_age_mean == 0.0
        assert forecast.steps_per_h < 3600 / 1.3


def test_colocated_adds_both_sides_up_and_may_gain_the_devices_of_the_other() -> None:
    """A step is 1 s of the server, which it fills, and 0.4 s of the learner; both have one device."""
    found = make_plan(measure(records()), spec(), spec()).colocated
    assert found.slow.steps_per_h == pytest.approx(3600 / 1.4, rel=0.03)
    assert found.fast.steps_per_h == pytest.approx(3600 / 0.7, rel=0.03)
    assert found.slow.learner_idle == pytest.approx(1.0 / 1.4, abs=0.03)
    assert found.slow.servers_idle == pytest.approx(0.4 / 1.4, abs=0.03)


def test_colocated_gains_in_proportion_to_the_devices_of_each() -> None:
    planned = spec(learner={"data_parallel_size": 3})
    found = make_plan(measure(records()), spec(learner={"data_parallel_size": 3}), planned).colocated
    assert found.fast.steps_per_h == pytest.approx(3600 / (1.0 / 4 + 0.4 * 3 / 4), rel=0.03)


def test_a_run_that_took_turns_is_refused() -> None:
    turns = spec(placement={"rollout": "colocated"})
    with pytest.raises(ConfigError, match=r"placement\.rollout: a plan follows from a run of separate"):
        make_plan(measure(records()), turns, turns)


def test_without_numbers_a_plan_has_the_balanced_one_and_the_runs_own() -> None:
    plan = make_plan(measure(records()), spec(), spec())
    counts = [row.servers for row in plan.rows]
    assert {1, 2, 4, *plan.balanced} <= set(counts)
    assert counts == sorted(counts)
    assert [item["servers"] for item in plan.as_record()["forecasts"]] == counts


def test_only_settings_that_leave_the_rates_as_they_are_can_be_changed() -> None:
    document = spec().model_dump(mode="json")
    document["off_policy"]["max_off_policy_steps"] = 5
    assert planned_spec(spec(), document).slots == 6 * 32
    for section, key, value in (("rollout", "rollout_max_tokens", 9), ("learner", "lr", 0.5)):
        wrong = spec().model_dump(mode="json")
        wrong[section][key] = value
        with pytest.raises(ConfigError, match=f"--set {section}.{key}: may change the rates"):
            planned_spec(spec(), wrong)
    document["off_policy"]["max_off_policy_steps"] = -1
    with pytest.raises(ConfigError, match=r"off_policy\.max_off_policy_steps"):
        planned_spec(spec(), document)
