"""The table says what was found, and does not hide what was not reached."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos import table, waits
from tests.chaos.campaign import disagreements
from tests.chaos.oracle import examine
from tests.chaos.result import Result
from tests.chaos.rows import ROWS, Row
from tests.chaos.run import FAULTS
from tests.chaos.written import Writer

KILLS = Row("kill -9 of redis", "once", "kill", "redis", 100, progress_p95_s=10.0, why_late="two cores, five services")


def line(row: Row, result: Result) -> str:
    return table.line_of(row, json.loads(result.as_json()))


def test_no_row_is_there_twice_and_each_has_a_fault() -> None:
    commands = [row.command for row in ROWS]
    assert len(commands) == len(set(commands))
    assert all(row.fault in FAULTS for row in ROWS)


def test_a_row_tells_its_bound_its_command_its_machine_and_its_figures() -> None:
    result = Result(
        "kill -9 redis", 100, 1, progress_s=[3.0, 4.0], seconds=75.0, extra={"noticed s": {"p50": 6.2, "max": 9.1}}
    )
    said = line(KILLS, result)
    assert "0 violations in 100 trials (< 0.03 at 95 %); noticed s p50 6.2, max 9.1" in said
    assert KILLS.command in said
    assert "cores, 75 s" in said
    assert "not 10 s" not in said
    assert not result.missed


def test_a_time_that_was_missed_is_told_with_its_cause_and_is_no_violation() -> None:
    result = Result("kill -9 redis", 100, 1, progress_s=[3.0, 14.0], progress_p95_s=10.0)
    assert "**went on late: p95 14 s, not 10 s**: two cores, five services" in line(KILLS, result)
    assert result.good
    assert "went on late" in result.as_text()


def test_a_violation_is_told_first() -> None:
    result = Result("kill -9 redis", 100, 1, violations=["group 7 | trained twice\nand more"])
    assert "**1 violations** in 100 trials: group 7 / trained twice |" in line(KILLS, result)


def test_the_wait_furthest_beyond_its_deadline_is_found(tmp_path: Path) -> None:
    assert waits.longest(tmp_path) is None
    folder = waits.folder_of(tmp_path)
    folder.mkdir()
    for name, wait in {"rank-1": ["a reply", 9.0, 10.0], "reward-2": ["a connection", 12.0, 5.0]}.items():
        (folder / name).write_text(json.dumps(wait))
    found = waits.longest(tmp_path)
    assert found is not None
    assert found.what == "a connection"
    assert found.share > waits.MOST


def test_a_step_that_people_read_twice_or_never_is_a_violation(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "job")
    writer.steps(4)
    finding = examine(writer.folder, ended=False)
    audit = finding.audit
    counted = {fate.value: count for fate, count in audit.fates.items()} | {
        "issued": audit.issued,
        "active": audit.active,
    }
    record = {"groups": dict.fromkeys(("degenerate", "stale", "failed", "cancelled"), 0) | counted, "step": 4}
    assert not list(disagreements(record, [1, 2, 3, 4], finding))
    for history in ([1, 2, 2, 3, 4], [1, 2, 4], [1, 2, 4, 3]):
        assert len(list(disagreements(record, history, finding))) == 1, history
