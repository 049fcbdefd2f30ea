"""An outage is compared with the steps on both sides of it."""

from __future__ import annotations

import pytest

from benchmarks.tracker_outage import Rate, outages


def test_a_job_that_becomes_steadily_faster_shows_no_cost() -> None:
    rates = [Rate(100.0 + 10.0 * place, place % 2 == 0) for place in range(7)]
    assert outages(rates) == pytest.approx([1.0, 1.0, 1.0])


def test_steps_that_are_lost_while_the_server_is_away_show() -> None:
    rates = [Rate(100.0, True), Rate(50.0, False), Rate(100.0, True), Rate(100.0, False), Rate(100.0, True)]
    assert outages(rates) == [0.5, 1.0]
