"""`millrace chat`, over a stand-in client: what is printed where, what is remembered, what stops."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any, cast

import httpx
import pytest

from millrace.gateway import GatewayClient, GatewayError
from services.cli.commands import chat
from tests.unit.millrace.test_gateway import client_of


def chunk(text: str | None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"delta": delta, "finish_reason": more.pop("reason", None)}], **more}


LAST = chunk(None, reason="stop", policy_version={"min": 17, "max": 18})


class StandIn:
    """Answers each turn with the next of its scripts."""

    def __init__(self, *scripts: list[dict[str, Any] | BaseException]) -> None:
        self._scripts = iter(scripts)
        self.asked: list[dict[str, Any]] = []

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        self.asked.append(body)
        for item in next(self._scripts):
            if isinstance(item, BaseException):
                raise item
            yield item


def converse(monkeypatch: pytest.MonkeyPatch, client: StandIn, *lines: str) -> None:
    typed: Iterator[str] = iter(lines)

    def read(_: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    chat._converse(cast("GatewayClient", client), {"model": "demo-1"})


def test_a_conversation_carries_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = StandIn([chunk("He"), chunk("llo"), LAST], [chunk("Bye"), LAST], [chunk("?"), LAST])
    converse(monkeypatch, client, "hi", "", "so long", "/new", "who?", "/quit", "never asked")
    said = [[(m["role"], m["content"]) for m in body["messages"]] for body in client.asked]
    assert said == [
        [("user", "hi")],
        [("user", "hi"), ("assistant", "Hello"), ("user", "so long")],
        [("user", "who?")],
    ]
    captured = capsys.readouterr()
    assert captured.out == "Hello\nBye\n?\n"
    assert captured.err.count("(policy versions 17 to 18)") == 3


def test_a_refused_line_is_forgotten_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = StandIn([GatewayError("every place is taken", status=429)], [chunk("Hi"), LAST])
    converse(monkeypatch, client, "one", "two")
    assert [m["content"] for m in client.asked[1]["messages"]] == ["two"]
    assert "millrace: every place is taken" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client = StandIn([chunk("Once upon"), KeyboardInterrupt()], [chunk("Hi"), LAST])
    converse(monkeypatch, client, "tell", "hi")
    captured = capsys.readouterr()
    assert captured.out == "Once upon\nHi\n"
    assert "(stopped)" in captured.err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chat.Answer("5", "stop", {"min": 4, "max": 4}), "policy version 4"),
        (chat.Answer("5", "length", {"min": 4, "max": 5}), "policy versions 4 to 5, cut off by --max-tokens"),
        (chat.Answer("5", None, None), "stopped"),
    ],
)
def test_an_answer_names_its_source(answer: chat.Answer, words: str) -> None:
    assert answer.source == words


def test_chunks_are_read_as_they_are_sent_and_an_error_in_the_middle_is_raised() -> None:
    def stream(*events: object) -> httpx.Response:
        body = ": ping\r\n\r\n" + "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events)
        return httpx.Response(200, text=f"{body}data: [DONE]\r\n\r\n")

    assert list(client_of(lambda _: stream(chunk("a"), LAST)).chat({})) == [chunk("a"), LAST]
    broken = client_of(lambda _: stream(chunk("a"), {"error": {"message": "training took the server"}})).chat({})
    assert next(broken) == chunk("a")
    with pytest.raises(GatewayError, match="training took the server") as caught:
        next(broken)
    assert caught.value.passing
