"""What is reported of a job, in which order, and when following it ends."""

from __future__ import annotations

import httpx
import pytest

from millrace import follower as module
from millrace.follower import Evaluated, Follower, JobEvent, StateChanged, StepTrained, follow, follow_steps
from millrace.gateway import GatewayClient, GatewayError
from services.common.errors import DeadlineExceeded
from tests.unit.millrace.stand_in import RECORD, StandIn, on_transport


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.0)


def brief(event: JobEvent) -> str:
    return event.state if isinstance(event, StateChanged) else f"{type(event).__name__} {event.step}"


def test_each_step_is_reported_once_through_outages_and_the_last_state_after_all_of_them() -> None:
    job = StandIn(7, outages=True)
    steps = [f"StepTrained {n}" for n in range(1, 8)]
    assert [brief(event) for event in follow(job.gateway(), "demo")] == ["running", *steps, "succeeded"]


def test_an_evaluation_comes_after_its_step_and_once() -> None:
    job = StandIn(2)
    job.evals = [{"step": 0, "avg_at_k": 0.25}, {"step": 2, "avg_at_k": 0.5}]
    found = [brief(event) for event in follow(job.gateway(), "demo")]
    assert found == ["running", "Evaluated 0", "StepTrained 1", "StepTrained 2", "Evaluated 2", "succeeded"]


def test_a_history_of_several_pages_is_read_to_its_end_in_order() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/metrics"):
            return httpx.Response(200, json=RECORD | {"state": "failed", "cause": "rank 0 died", "step": 5})
        first = int(request.url.params["from"])
        evals = [{"step": step} for step in (0, 5) if step == 0 or first > 5]
        steps = [{"step": n} for n in range(first, min(first + 2, 6))]
        return httpx.Response(200, json={"steps": steps, "evals": evals})

    events = list(follow(on_transport(GatewayClient("http://gateway", None), answer), "demo"))
    steps = [f"StepTrained {n}" for n in range(1, 6)]
    assert [brief(event) for event in events] == ["Evaluated 0", *steps, "Evaluated 5", "failed"]
    assert isinstance(events[-1], StateChanged)
    assert events[-1].cause == "rank 0 died"


def test_a_state_is_reported_where_it_or_its_cause_changes_only() -> None:
    texts = iter([("stalled", "no rewards"), ("stalled", "no rewards"), ("stalled", "no servers"), ("cancelled", "")])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/metrics"):
            return httpx.Response(200, json={"steps": [], "evals": []})
        state, cause = next(texts)
        return httpx.Response(200, json=RECORD | {"state": state, "cause": cause})

    events = list(follow(on_transport(GatewayClient("http://gateway", None), answer), "demo"))
    assert [event.cause for event in events if isinstance(event, StateChanged)] == ["no rewards", "no servers", ""]


def test_a_follower_sleeps_only_after_a_poll_without_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 5.0)
    job = StandIn(100)
    follower = Follower(job.gateway(), "demo")
    assert (follower.poll() != [], follower.delay_s) == (True, 0.0)
    monkeypatch.setattr(job, "_move", lambda: None)
    assert (follower.poll(), follower.delay_s) == ([], 5.0)


def test_a_follower_has_a_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="job demo is running after 0 s"):
        list(follow_steps(StandIn(10**9).gateway(), "demo", timeout_s=0.0))


@pytest.mark.parametrize(("status", "polls"), [(404, 1), (503, 2)])
def test_a_refusal_ends_the_following_at_once_and_an_outage_when_it_has_lasted(
    status: int, polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) == 2:
            monkeypatch.setattr(module, "MAX_OUTAGE_S", -1.0)
        return httpx.Response(status, json={"error": {"message": "no"}})

    with pytest.raises(GatewayError):
        list(follow(on_transport(GatewayClient("http://gateway", None), answer), "demo"))
    assert len(asked) == polls


def test_events_say_what_is_asked_of_them_most() -> None:
    step, evaluated = (
        StepTrained({"step": 3, "reward": 0.5, "accuracy": None}),
        Evaluated({"step": 3, "avg_at_k": 0.25}),
    )
    assert (step.step, step.reward, step.accuracy) == (3, 0.5, None)
    assert (evaluated.step, evaluated.accuracy) == (3, 0.25)
