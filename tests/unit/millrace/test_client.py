"""Client and job, over a gateway that the test writes; a real one: tests/integration/millrace."""

from __future__ import annotations

import sys

import pytest

from millrace import follower
from millrace.job import JobFailedError
from services.common.errors import DeadlineExceeded
from tests.unit.millrace.stand_in import StandIn


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "POLL_INTERVAL_S", 0.0)


def test_a_job_that_succeeds_is_waited_for_and_returned_with_its_last_record() -> None:
    job = StandIn(3).client().job("demo")
    assert job.wait() is job
    assert (job.state, job.record["step"], job.has_ended) == ("succeeded", 3, True)


@pytest.mark.parametrize(("end", "cause"), [("failed", "rank 0 died"), ("cancelled", "")])
def test_a_job_that_does_not_succeed_raises_with_its_cause_unless_it_is_not_checked(end: str, cause: str) -> None:
    with pytest.raises(JobFailedError) as caught:
        StandIn(3, end, cause).client().job("demo").wait()
    assert str(caught.value) == f"job demo-0000000a {end} at step 3 of 3{': ' if cause else ''}{cause}"
    assert StandIn(3, end, cause).client().job("demo").wait(check=False).state == end


def test_a_wait_that_is_too_long_leaves_the_job_running() -> None:
    gateway = StandIn(10**6)
    with pytest.raises(DeadlineExceeded):
        gateway.client().job("demo").wait(timeout_s=0.0)
    assert {method for method, _, _ in gateway.asked} == {"GET"}


def test_a_record_follows_the_events() -> None:
    job = StandIn(2).client().job("demo")
    assert [(type(event).__name__, job.record["step"]) for event in job.follow()] == [
        ("StateChanged", 1), ("StepTrained", 1), ("StepTrained", 2), ("StateChanged", 2),
    ]  # fmt: skip


def test_a_bar_shows_state_step_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    gateway = StandIn(3)
    gateway.evals = [{"step": 3, "avg_at_k": 0.625}]
    gateway.client().job("demo").wait(progress=True)
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    for words in ("demo-0000000a succeeded", "3/3", "reward=0.300", "held-out=0.625"):
        assert words in last


def test_without_tqdm_a_job_is_followed_without_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert StandIn(2).client().job("demo").wait(progress=True).state == "succeeded"
    assert capsys.readouterr().err == ""


def test_tags_are_added_to_those_that_the_job_has_now() -> None:
    gateway = StandIn()
    job = gateway.client().job("demo")
    gateway.record = gateway.record | {"tags": ["first", "of-somebody-else"]}
    job.label(add=["kept", "first"], remove=["first"])
    assert gateway.asked[-1] == ("PATCH", "/jobs/demo-0000000a", {"tags": ["of-somebody-else", "kept"]})
    assert job.label(notes="seed 7").record["notes"] == "seed 7"


def test_a_resubmitted_job_is_another_with_the_same_settings_but_those_that_are_given() -> None:
    gateway = StandIn()
    job = gateway.client().job("demo")
    again = job.resubmit({"learner.lr": 3e-6}, tags=["second"])
    sent = {"name": "demo", "learner": {"lr": 3e-6}, "tags": ["first", "second"]}
    assert gateway.asked[-1] == ("POST", "/jobs", sent)
    assert (again.id, job.id) == ("demo-0000000b", "demo-0000000a")
    assert job.spec()["learner"] == {"lr": 1e-6}


def test_a_text_is_what_the_user_says_and_a_beginning_of_an_id_is_made_whole() -> None:
    gateway = StandIn()
    assert gateway.client().chat("2 + 3 =", model="demo", max_tokens=4, stop="END") == "forty"
    (_, _, body) = gateway.asked[-1]
    assert body == {
        "model": "demo-0000000a", "messages": [{"role": "user", "content": "2 + 3 ="}], "temperature": 1.0, "top_p": 1.0,
        "max_tokens": 4, "stop": ["END"], "stream": True,
    }  # fmt: skip


def test_a_streamed_answer_comes_in_pieces_and_then_says_what_sampled_it() -> None:
    client = StandIn().client()
    with client.stream_chat([{"role": "user", "content": "hi"}], model=client.job("demo")) as answer:
        pieces = iter(answer)
        assert (next(pieces), answer.text, answer.finish_reason) == ("for", "for", None)
        assert list(pieces) == ["ty"]
    assert (answer.text, answer.finish_reason, answer.policy_version) == ("forty", "stop", {"min": 3, "max": 4})
