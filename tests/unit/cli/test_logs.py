"""A job's lines out of several logs: only its own, in order, across growth, halves of lines and rotation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.logs import Filter, LogReader, format_line

JOB = "demo-0123abcd"


def write(path: Path, *lines: dict[str, object] | str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def line(
    second: int, message: str, *, service: str = "learner", level: str = "INFO", **more: object
) -> dict[str, object]:
    stamp = f"2026-01-02T03:04:{second:02d}.000Z"
    return {"at": stamp, "level": level, "service": service, "logger": "l", "job_id": JOB, "message": message} | more


def messages(reader: LogReader) -> list[object]:
    return [found["message"] for found in reader.read()]


def test_lines_of_all_services_are_merged_by_time_and_others_left_out(tmp_path: Path) -> None:
    write(tmp_path / "learner-0.log", line(1, "a"), "INFO vllm said demo-0123abcd", line(3, "c"))
    write(tmp_path / "rollout-0.log", line(2, "b"), line(2, "other", job_id="demo-ffffffff"), '{"half": "demo-0123abcd')
    write(tmp_path / "up.log", "ready", f'["{JOB}"]', json.dumps({"message": JOB}))
    assert messages(LogReader(tmp_path, Filter(JOB))) == ["a", "b", "c"]


@pytest.mark.parametrize(("level", "expected"), [("debug", "dwe"), ("info", "we"), ("warning", "we"), ("error", "e")])
def test_lines_below_the_level_are_left_out(tmp_path: Path, level: str, expected: str) -> None:
    levels = {"d": "DEBUG", "w": "WARNING", "e": "ERROR"}
    write(tmp_path / "learner-0.log", *(line(n, name, level=word) for n, (name, word) in enumerate(levels.items())))
    assert messages(LogReader(tmp_path, Filter(JOB, level))) == list(expected)


def test_the_gateways_reads_are_shown_when_it_is_asked_for_only(tmp_path: Path) -> None:
    access = {"service": "gateway", "logger": "millrace.gateway.access"}
    get, post = line(1, "GET /jobs/{job_id} -> 200", **access), line(2, "POST /jobs/{job_id}/pause -> 200", **access)
    write(tmp_path / "gateway.log", get, post)
    write(tmp_path / "learner-0.log", line(3, "own"))
    assert messages(LogReader(tmp_path, Filter(JOB))) == [post["message"], "own"]
    assert messages(LogReader(tmp_path, Filter(JOB, service="gateway"))) == [get["message"], post["message"]]


def test_later_reads_give_what_is_new_and_no_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.log"
    write(path, line(1, "a"))
    reader = LogReader(tmp_path, Filter(JOB))
    assert messages(reader) == ["a"]
    text = json.dumps(line(2, "b"))
    with path.open("a") as file:
        file.write(text[:30])
    assert messages(reader) == []
    with path.open("a") as file:
        file.write(text[30:] + "\n")
    write(tmp_path / "rollout-1.log", line(3, "a server that joined"))
    assert messages(reader) == ["b", "a server that joined"]
    assert messages(reader) == []


def test_a_rotated_log_is_read_before_and_after(tmp_path: Path) -> None:
    path, older = tmp_path / "learner-0.log", tmp_path / "learner-0.log.1"
    write(older, line(1, "oldest"))
    write(path, line(2, "old"))
    reader = LogReader(tmp_path, Filter(JOB))
    assert messages(reader) == ["oldest", "old"]
    path.replace(older)
    write(path, line(3, "new"))
    assert "new" in messages(reader)
    assert "oldest" not in messages(reader)


def test_a_line_for_people_has_time_level_service_and_what_else_it_is_about() -> None:
    shown = format_line(line(5, "it broke\nbadly", level="ERROR", step=3, error="Traceback\n  ValueError"))
    assert shown.splitlines() == [
        "03:04:05.000 ERROR   learner  it broke  [step=3]",
        "    badly",
        "    Traceback",
        "      ValueError",
    ]
