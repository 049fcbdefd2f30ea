"""The gateway's client, over answers as the gateway gives them."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from millrace.gateway import Event, GatewayClient, GatewayError, parse_events

Answer = Callable[[httpx.Request], httpx.Response]


def client_of(answer: Answer) -> GatewayClient:
    client = GatewayClient("http://gateway/", "secret")
    client._http = httpx.Client(
        base_url=client.url, headers=client._http.headers, transport=httpx.MockTransport(answer)
    )
    return client


def refuse(status: int, **error: object) -> Answer:
    return lambda _: httpx.Response(status, json={"error": {"code": "x", **error}})


def test_a_submitted_spec_travels_with_token_and_key() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, json={"id": "job-1"})

    assert client_of(answer).submit({"name": "x"}, idempotency_key="k") == {"id": "job-1"}
    request = seen[0]
    assert (request.method, request.url.path) == ("POST", "/jobs")
    assert json.loads(request.content) == {"name": "x"}
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["idempotency-key"] == "k"


def test_wrong_fields_are_told_one_a_line() -> None:
    fields = [{"field": "learner.lr", "message": "too high"}, {"field": "model", "message": "Field required"}]
    with pytest.raises(GatewayError) as caught:
        client_of(refuse(422, message="not valid", fields=fields)).submit({})
    assert str(caught.value).splitlines() == ["not valid", "  learner.lr: too high", "  model: Field required"]
    assert not caught.value.passing


@pytest.mark.parametrize(("status", "advice"), [(401, "MILLRACE_TOKEN"), (404, "`millrace jobs`")])
def test_a_refusal_says_what_to_do_next(status: int, advice: str) -> None:
    with pytest.raises(GatewayError, match=advice):
        client_of(refuse(status, message="no", fields=None)).job("x")


def closing_once(asked: list[str]) -> Answer:
    """A gateway that closes its connection at the first request."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        if len(asked) == 1:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, json={"id": "job-1"})

    return answer


def test_a_read_whose_connection_was_closed_is_asked_again() -> None:
    asked: list[str] = []
    assert client_of(closing_once(asked)).job("job-1") == {"id": "job-1"}
    assert asked == ["GET", "GET"]


def test_what_changes_something_is_never_sent_twice() -> None:
    asked: list[str] = []
    with pytest.raises(GatewayError, match="does not answer"):
        client_of(closing_once(asked)).pause("job-1")
    assert asked == ["POST"]


def test_an_answer_that_is_no_json_is_told_as_such() -> None:
    with pytest.raises(GatewayError, match="is it a Millrace gateway"):
        client_of(lambda _: httpx.Response(200, text="hello")).jobs()
    with pytest.raises(GatewayError, match="answered 502 Bad Gateway"):
        client_of(lambda _: httpx.Response(502, text="<html>")).jobs()


def test_no_answer_names_the_address() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(GatewayError, match=r"http://gateway does not answer \(refused\)") as caught:
        client_of(answer).jobs()
    assert caught.value.passing


def test_a_job_id_cannot_leave_its_path() -> None:
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={})

    client_of(answer).job("../workers?x=1")
    assert seen == [b"/jobs/..%2Fworkers%3Fx%3D1"]


def test_events_are_parsed_with_ids_kinds_and_data() -> None:
    lines = [
        ": ping", "id: 1-0", "event: state", 'data: {"state": "running"}', "",
        'data: {"a":', "data: 1}", "",
        "event: note", "data: plain", "",
        "event: nothing", "",
        "id: 2-0", "event: unfinished", "data: {}",
    ]  # fmt: skip
    assert list(parse_events(iter(lines))) == [
        Event("1-0", "state", {"state": "running"}),
        Event("1-0", "message", {"a": 1}),
        Event("1-0", "note", {"text": "plain"}),
    ]


def test_events_go_on_after_the_last_one_seen() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["last-event-id"] == "5-0"
        return httpx.Response(200, text='id: 6-0\nevent: end\ndata: {"state": "failed"}\n\n')

    assert list(client_of(answer).events("job", after="5-0")) == [Event("6-0", "end", {"state": "failed"})]
