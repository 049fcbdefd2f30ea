"""The hostile campaign sees what it is there to see, and each of its cases can be made again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos import guest
from tests.chaos.grammar.cases import FIRST, TABLES, Case, Unrest, draw
from tests.chaos.guest import Guest, Interrupted, Stay, Stuck
from tests.chaos.job import furnish

ENDS = Case(3, "1:3", ("template: division by zero",), None, 0.0)
REFUSED = Case(4, "1:4", ("spec: a boolean as an integer",), None, 0.0)
HARMLESS = Case(5, "1:5", ("weights: all zero",), None, 0.0)
PROCEDURAL = Case(6, "1:6", ("procedural: maze",), None, 0.0)
RECORD = {"id": "hostile-3-0a", "state": "failed", "cause": "the template divides by zero", "step": 0, "groups": {}}

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    furnish(tmp_path)
    return tmp_path


def visit(home: Path, case: Case, answer: Answer) -> Stay:
    client = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(answer))
    return Guest(home, client, case, threading.Event()).visit()


def gateway(*, status: int = 201, error: str | None = None, **record: Any) -> Answer:
    """Answers a submission so, and then tells the record."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/jobs":
            return httpx.Response(200, json=RECORD | record)
        if status >= httpx.codes.BAD_REQUEST:
            return httpx.Response(status, json={"error": {"message": error or ""}})
        return httpx.Response(status, json=RECORD | record)

    return answer


def test_a_job_that_was_refused_or_failed_with_a_cause_is_well(home: Path) -> None:
    stay = visit(home, REFUSED, gateway(status=422, error="learner.steps: must be an integer"))
    assert (stay.end, stay.violations) == ("refused", [])
    stay = visit(home, ENDS, gateway())
    assert (stay.end, stay.cause, stay.violations) == ("failed", RECORD["cause"], [])
    assert not visit(home, HARMLESS, gateway(state="succeeded", cause="")).violations


@pytest.mark.parametrize(
    ("case", "answer", "said"),
    [
        (REFUSED, gateway(status=500, error="internal"), "was answered 500"),
        (REFUSED, gateway(status=503, error="Redis is away"), "was answered 503"),
        (REFUSED, gateway(status=422), "without a reason"),
        (REFUSED, gateway(), "was taken in, and should have been refused"),
        (PROCEDURAL, gateway(status=422, error="reasoning-gym has no task 'maze'"), "what is not true"),
        (ENDS, gateway(state="succeeded", cause=""), "succeeded"),
        (ENDS, gateway(cause=" "), "ended failed without a cause"),
        (ENDS, gateway(cause="the ranks ended with exit code 1"), "tells nothing"),
    ],
)
def test_a_wrong_end_is_found(home: Path, case: Case, answer: Answer, said: str) -> None:
    violations = visit(home, case, answer).violations
    assert len(violations) == 1
    assert said in violations[0]
    assert str(case) in violations[0]


def test_a_gateway_that_does_not_answer_is_found(home: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too long", request=request)

    assert "had no answer: ReadTimeout" in visit(home, REFUSED, answer).violations[0]


def test_a_job_that_does_not_end_is_cancelled_and_one_that_stays_then_is_stuck(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("END_S", "CANCEL_S", "LOOK_S"):
        monkeypatch.setattr(guest, name, 0.05)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json=RECORD | {"state": "running", "cause": ""})

    client = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(answer))
    stuck = Guest(home, client, ENDS, threading.Event())
    with pytest.raises(Stuck):
        stuck.visit()
    assert asked.count(f"/jobs/{RECORD['id']}/cancel") == 1
    assert ["has not ended" in stuck.stay.violations[0], "after it was cancelled" in stuck.stay.violations[1]] == [
        True,
        True,
    ]


def test_a_job_that_says_why_it_is_slow_has_more_time_as_long_as_its_groups_come(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "END_S", 0.0)
    monkeypatch.setattr(guest, "LOOK_S", 0.0)
    monkeypatch.setattr(guest, "QUIET_S", 0.3)
    issued = iter(range(1, 50))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/cancel"):
            return httpx.Response(200, json=RECORD | {"state": "cancelled"})
        groups = {"issued": next(issued, 50)}
        state = "stalled" if groups["issued"] < 50 else "failed"
        return httpx.Response(200, json=RECORD | {"state": state, "cause": "none was informative", "groups": groups})

    assert visit(home, ENDS, answer).end == "failed"


def test_a_key_that_gives_several_jobs_is_found(home: Path) -> None:
    numbers = iter(range(100))

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(201, json=RECORD | {"id": f"hostile-3-{next(numbers)}"})

    case = Case(3, "1:3", ("template: division by zero",), Unrest.SUBMIT_AGAIN, 0.0)
    assert any("one Idempotency-Key gave the jobs" in said for said in visit(home, case, answer).violations)


def test_who_was_interrupted_says_nothing(home: Path) -> None:
    halted = threading.Event()
    halted.set()
    client = httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(gateway()))
    with pytest.raises(Interrupted):
        Guest(home, client, ENDS, halted).visit()


def made(home: Path, case: Case) -> tuple[str, dict[str, bytes]]:
    """The case's spec or body, and its files."""
    draft = case.draft(home)
    paths = [path for path in home.rglob(f"*{draft.name}*/*") if path.is_file()]
    paths += [path for path in (home / "data").glob(f"{draft.name}.*") if path.is_file()]
    files = {str(path.relative_to(home)): path.read_bytes() for path in paths if path.stat().st_size < 1024**2}
    draft.clear()
    return repr(draft.body or json.dumps(draft.spec)), files


def test_a_case_can_be_made_again_from_its_seed_alone(home: Path) -> None:
    for number in range(40):
        case = draw(7, number)
        if not any(part.startswith(("data", "procedural: any")) for part in case.parts):  # these take long
            assert case == draw(7, number)
            assert made(home, case) == made(home, case), str(case)
    assert not list((home / "models").glob("hostile-*"))


def test_a_short_run_has_what_once_took_a_service_down_and_a_long_one_has_every_part() -> None:
    parts = {part for table in TABLES.values() for part in table}
    assert parts > FIRST
    drawn = [draw(1, number) for number in range(len(parts))]
    assert {case.parts[0] for case in drawn[: len(FIRST)]} == FIRST
    assert {case.parts[0] for case in drawn} == parts
    assert {case.unrest for case in drawn} == {None, *Unrest}


def test_the_lifelike_script_refuses_what_the_real_engine_and_ranks_refuse(home: Path) -> None:
    from tests.chaos.scripted import lifelike

    def trouble(*parts: str) -> str | None:
        draft = Case(1, "1:1", parts, None, 0.0).draft(home)
        try:
            return lifelike.engine_refuses(draft.model())
        finally:
            draft.clear()

    assert lifelike.engine_refuses(home / "models" / "scripted") is None
    assert lifelike.is_finite(home / "models" / "scripted")
    assert "head_size" in str(trouble("config: heads that the engine has no kernel for"))
    assert "the model's file has no model.layers.1" in str(trouble("config: layers that are not there"))
    assert "has no" in str(trouble("weights: a tensor that is missing"))
    assert "cannot be read" in str(trouble("weights: empty"))
    assert trouble("weights: all NaN") is None


@pytest.mark.parametrize("words", ["row 3", "nothing", f"row {10**40}", "row -1"])
def test_the_lifelike_script_samples_whatever_a_prompt_says(words: str) -> None:
    from tests.chaos.scripted import lifelike, script

    assert script.token(b"mark", lifelike.row_of(list(words.encode())), 0, 0) in range(ord("0"), ord("9") + 1)


async def test_the_scripted_engine_prints_why_it_refuses_a_model_as_the_real_one_does(home: Path) -> None:
    from services.common.config.settings import Platform
    from services.common.spec.job import JobSpec
    from tests.chaos.scripted.engine import ScriptedEngine

    spec = JobSpec.model_validate({"model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}})
    draft = Case(1, "1:1", ("config: heads that the engine has no kernel for",), None, 0.0).draft(home)
    engine = ScriptedEngine(Platform.CPU)
    with pytest.raises(RuntimeError, match="See root cause above"):
        await engine._start_vllm(draft.model(), spec)
    assert (await engine.last_error()).startswith("ValueError: head_size")
    await engine.stop()
    draft.clear()
