"""What people read of a plan."""

from __future__ import annotations

import io

from rich.console import Console

from services.cli.views.plan import print_plan
from services.common.capacity.plan import make_plan
from services.common.capacity.rates import measure
from tests.unit.common.capacity.step_records import records, spec


def shown(wait_s: float = 0.6, servers: tuple[int, ...] = ()) -> str:
    output = io.StringIO()
    print_plan(Console(file=output, width=160), make_plan(measure(records(wait_s=wait_s)), spec(), spec(), servers))
    return output.getvalue()


def test_a_plan_has_a_row_for_each_number_and_marks_the_balanced_one() -> None:
    lines = shown().splitlines()
    rows = {words[0]: words for line in lines if (words := line.split()) and words[0].isdigit()}
    assert {"1", "2", "3", "4"} <= set(rows)
    assert rows["3"][1] == "*"
    assert 3500 < int(rows["1"][1].replace(",", "")) < 3700
    assert any(line.startswith("* balanced: ") for line in lines)


def test_it_says_in_words_what_limits_and_what_is_supposed() -> None:
    text = shown()
    assert "with 1: the rollout servers are the limit: the learner waits for them" in text
    assert "each server is supposed to have a device of its own" in text
    assert "a range:" not in shown(servers=(1,))


def test_what_the_run_leaves_open_is_shown_as_a_range_and_explained() -> None:
    text = shown(wait_s=0.95, servers=(8,))
    assert "–" in text
    assert "a range: this run does not show" in text
