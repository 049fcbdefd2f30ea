"""A figure that grows is told from one that only goes up and down."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import soak
from tests.chaos.gauges import MIB, taken
from tests.chaos.slopes import Trend, table, trend

TIMES = [15.0 * number for number in range(320)]


def of(shape: Callable[[float], float], quantity: str = "memory, MiB", times: list[float] = TIMES) -> Trend:
    return trend("gateway", quantity, times, [shape(at) for at in times])


def test_a_slow_leak_is_found_and_its_slope_is_right() -> None:
    leak = of(lambda at: 200.0 + 40.0 * at / 3600)
    assert leak.flat is False
    assert leak.per_hour == pytest.approx(40.0)
    assert "**rises**" in table([leak])[-1]


def test_a_leak_below_the_waves_of_jobs_that_come_and_go_is_found() -> None:
    noise = random.Random(1)
    waves = of(lambda at: 900.0 + 60.0 * at / 3600 + (300.0 if at % 300 < 200 else 0.0) + noise.uniform(-20, 20))
    assert waves.flat is False


def test_what_only_goes_up_and_down_is_flat() -> None:
    noise = random.Random(1)
    assert of(lambda at: 900.0 + (300.0 if at % 300 < 200 else 0.0) + noise.uniform(-20, 20)).flat is True
    assert of(lambda at: 50.0 + (at % 60 == 0), "open files").flat is True
    assert of(lambda at: 500.0 - 100.0 * at / 3600).flat is True  # it falls


def test_one_file_or_thread_a_minute_is_found() -> None:
    assert of(lambda at: 50.0 + at // 60, "open files").flat is False
    assert of(lambda at: 50.0 + at // 60, "threads").flat is False


def test_a_short_run_says_that_it_tells_nothing() -> None:
    short = of(lambda at: 200.0 + at, times=TIMES[:10])
    assert short.flat is None
    assert "too short to tell" in table([short])[-1]


def test_the_warm_up_is_left_out_and_a_figure_that_was_seen_once_has_no_trend() -> None:
    seen = [(at, {("redis", "keys"): 1000.0 if at < soak.WARM_UP_S else 5.0}) for at in TIMES]
    seen[-1][1]["rollout-0", "threads"] = 3.0
    (only,) = soak.judge(seen, TIMES[-1])
    assert (only.service, only.start, only.end, only.flat) == ("redis", 5.0, 5.0, True)


def test_the_room_that_files_take_counts_them_once_and_not_the_holes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "full").write_bytes(b"x" * MIB)
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert MIB <= taken(tmp_path) < 2 * MIB
