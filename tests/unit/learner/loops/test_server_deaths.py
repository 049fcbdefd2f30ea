"""When the deaths of rollout servers are the job's fault, and when they are not."""

from __future__ import annotations

from services.common.jobs.deaths import Death
from services.learner.loops.server_deaths import DeathCount


def death(number: int, *, loading: bool = False, worker: str = "rollout-0") -> Death:
    return Death(worker, f"cause {number}", float(number), loading)


def looked(*looks: tuple[list[Death], int]) -> str:
    """The verdict after looks at these deaths, with so many groups arrived by then; the first one sees none."""
    count = DeathCount()
    count.update([], 0)
    for deaths, arrived in looks:
        count.update(deaths, arrived)
    return count.verdict


def test_an_engine_that_dies_twice_before_it_samples_fails_the_job_with_the_newest_cause() -> None:
    first, second = death(1, loading=True), death(2, loading=True)
    assert looked(([first], 0)) == ""
    assert looked(([first], 0), ([first, second], 0)) == (
        "the engine does not start with this model: cause 2 (2 times in a row)"
    )


def test_servers_that_die_while_they_sample_fail_it_after_four() -> None:
    deaths = [death(number) for number in range(4)]
    assert looked((deaths[:3], 0)) == ""
    assert looked((deaths, 0)) == "rollout servers die while they serve the job: cause 3 (4 times in a row)"


def test_a_server_killed_twice_in_quick_succession_is_no_fault_of_the_job() -> None:
    assert looked(([death(1), death(2, loading=True)], 0)) == ""


def test_a_group_from_any_server_resets_the_count_however_many_die() -> None:
    deaths: list[Death] = []
    count = DeathCount()
    count.update(deaths, 0)
    for number in range(100):
        deaths.append(death(number, loading=number % 2 == 0))
        count.update(deaths[-50:], number)
        assert count.verdict == ""
        count.update(deaths[-50:], number + 1)


def test_deaths_of_before_this_head_are_not_counted() -> None:
    count = DeathCount()
    count.update([death(1, loading=True), death(2, loading=True)], 0)
    assert count.verdict == ""
    count.update([death(1, loading=True), death(2, loading=True), death(3, loading=True)], 0)
    assert count.verdict == ""
