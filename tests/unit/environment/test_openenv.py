"""Environment `openenv` against a server of the test. `make test-environments` plays OpenEnv's own server (tests/environments)."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import ServerConnection, serve

from services.common.errors import ConfigError, EnvironmentUnavailable
from services.environment.base import Environment, Message
from services.environment.registry import World, make
from services.environment.switches import OPENENV_HOSTS
from services.environment.worlds.openenv import OpenEnvError, OpenEnvUnavailable

Answer = Callable[[dict[str, Any]], str | None]


def said(text: object, reward: float | None = None, *, done: bool = False, field: str = "echoed_message") -> str:
    return json.dumps({"type": "observation", "data": {"observation": {field: text}, "reward": reward, "done": done}})


class Server:
    """Answers each message as it is told to, and keeps all messages; `None` is silence, "" the end."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.heard, self.paths = answer, list[dict[str, Any]](), list[str]()

    def __call__(self, connection: ServerConnection) -> None:
        self.paths.append(connection.request.path if connection.request else "")
        for raw in connection:
            self.heard.append(json.loads(raw))
            answer = self.answer(self.heard[-1])
            if answer == "" or self.heard[-1]["type"] == "close":
                return
            if answer is not None:
                connection.send(answer)


@contextmanager
def serving(handler: Callable[[ServerConnection], None], **options: Any) -> Iterator[str]:
    with serve(handler, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Environment]:
    def made(where: str, scheme: str = "http", **config: Any) -> Environment:
        monkeypatch.setenv(OPENENV_HOSTS, f"other:1,{where}")
        return make(World.OPENENV, {"url": f"{scheme}://{where}/", **config})

    return made


def echo(message: dict[str, Any]) -> str:
    if message["type"] == "reset":
        return said("ready")
    return said(message["data"].get("message"), 0.5, done=message["data"].get("message") == "end")


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_an_episode_is_one_connection_and_its_reward_the_sum_of_the_turns(
    scheme: str, begin: Callable[..., Environment]
) -> None:
    server = Server(echo)
    with serving(server) as where:
        environment = begin(where, scheme)
        assert environment.reset(7, {}).messages == (Message("user", "ready"),)
        turn = environment.step("one")
        assert (turn.messages, turn.reward, turn.done) == ((Message("user", "one"),), 0.5, False)
        end = environment.step("end")
        assert (end.reward, end.done, end.detail) == (1.0, True, "end")
        environment.close()
    assert server.paths == ["/ws"]
    assert [each["type"] for each in server.heard] == ["reset", "step", "step", "close"]
    assert server.heard[0]["data"] == {"seed": 7}


def test_a_server_that_never_ends_is_left_after_so_many_turns(begin: Callable[..., Environment]) -> None:
    with serving(Server(echo)) as where:
        environment = begin(where, turns=2)
        environment.reset(1, {})
        assert not environment.step("one").done
        assert environment.step("two").reward == 1.0


def test_fields_of_actions_and_observations_may_lie_within_others(begin: Callable[..., Environment]) -> None:
    def tools(message: dict[str, Any]) -> str:
        return said({"data": message["data"].get("arguments")}, 0.0, field="result")

    server = Server(tools)
    with serving(server) as where:
        environment = begin(
            where, action={"type": "call_tool", "tool_name": "echo", "arguments": {"loud": True}},
            action_field="arguments.text", observation_field="result.data", instructions="Say something.",
        )  # fmt: skip
        assert environment.reset(1, {}).messages == (Message("user", "Say something."),)
        (message,) = environment.step("Hi").messages
    assert server.heard[1]["data"] == {
        "type": "call_tool",
        "tool_name": "echo",
        "arguments": {"loud": True, "text": "Hi"},
    }
    assert json.loads(message.content) == {"loud": True, "text": "Hi"}


def test_an_unreachable_server_is_a_failure_that_names_it(begin: Callable[..., Environment]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    environment = begin(where)
    with pytest.raises(OpenEnvUnavailable, match=f"http://{where}/ cannot be reached: ConnectionRefusedError"):
        environment.reset(1, {})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "did not answer within 0.3 s"),
        ("", "broke off: ConnectionClosed"),
        ("<html>", "answered what is no JSON"),
        ("[1]", "answered with what is no observation"),
        ('{"type": "observation", "data": {"observation": {}, "done": 1}}', "answered with what is no observation"),
        (said("x", reward="much"), "answered with what is no observation"),  # type: ignore[arg-type]
        (said("x" * (1 << 20), 1.0), "broke off"),
        ('{"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}', "answered with an error: CAPACITY_REACHED: full"),
        (said(None, 1.0), "said no text in field echoed_message"),
        (said("over", done=True), "ended the episode without a reward"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_never_a_reward(answer: str | None, says: str, begin: Callable[..., Environment]) -> None:
    with serving(Server(lambda message: said("ready") if message["type"] == "reset" else answer)) as where:
        environment = begin(where, answer_timeout_s=0.3 if answer is None else 5.0)
        environment.reset(1, {})
        with pytest.raises(OpenEnvError, match=rf"http://{where}/ {says}"):
            environment.step("one")
        began = time.monotonic()
        environment.close()
        assert time.monotonic() - began < 1.0


def test_a_redirect_to_another_host_is_not_followed(begin: Callable[..., Environment]) -> None:
    server = Server(echo)
    with serving(server) as inside:

        def redirect(*_: object) -> Response:
            return Response(HTTPStatus.FOUND, "Found", Headers({"location": f"ws://{inside}/ws"}))

        with serving(Server(echo), process_request=redirect) as where:
            environment = begin(where)
            with pytest.raises(OpenEnvError, match="cannot be reached") as failure:
                environment.reset(1, {})
    assert not server.paths
    assert not isinstance(failure.value, EnvironmentUnavailable)


@pytest.mark.parametrize(
    ("status", "passes"),
    [(503, True), (502, True), (429, True), (404, False), (403, False)],
)
def test_a_server_that_is_overloaded_is_unavailable_and_one_that_refuses_is_not(
    status: int, passes: bool, begin: Callable[..., Environment]
) -> None:
    def refuse(*_: object) -> Response:
        return Response(status, HTTPStatus(status).phrase, Headers())

    says = f"rejected WebSocket connection: HTTP {status}"
    with serving(Server(echo), process_request=refuse) as where, pytest.raises(OpenEnvError, match=says) as failure:
        begin(where).reset(1, {})
    assert isinstance(failure.value, EnvironmentUnavailable) == passes


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (None, True),
        ("", True),
        ('{"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}', True),
        ('{"type": "error", "data": {"message": "no", "code": "VALIDATION_ERROR"}}', False),
        (said("x" * (1 << 20)), False),
        ("<html>", False),
    ],
    ids=["silent", "closes", "full", "refuses", "too long", "no JSON"],
)
def test_only_what_may_pass_is_unavailable(answer: str | None, passes: bool, begin: Callable[..., Environment]) -> None:
    with serving(Server(lambda _: answer)) as where:
        environment = begin(where, answer_timeout_s=0.3 if answer is None else 5.0)
        with pytest.raises(OpenEnvError) as failure:
            environment.reset(1, {})
        environment.close()
    assert isinstance(failure.value, EnvironmentUnavailable) == passes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "url must be an http, https, ws or wss address"),
        ({"url": 7}, "url must be a text"),
        ({"url": "file:///etc/passwd"}, "url must be an http, https, ws or wss address"),
        ({"url": "http://localhost:port"}, "url must be an http, https, ws or wss address"),
        ({"url": "http://user:word@here:80"}, "url has a user"),
        ({"url": "http://here:80?x=1"}, "url has a user, a query"),
        ({"url": "http://10.0.0.1:6379"}, "jobs may not reach 10.0.0.1:6379 from this server: its operator adds it to MILLRACE"),
        ({"url": "https://here"}, "jobs may not reach here:443"),
        ({"url": "http://here:80@there"}, "url has a user"),
        ({"url": "http://[::2]:80"}, r"jobs may not reach [::2]:80"),
        ({"url": "http://here", "turns": 0}, "turns must be"),
        ({"url": "http://here", "connect_timeout_s": 0}, "connect_timeout_s must be"),
        ({"url": "http://here", "action_field": "a..b"}, "action_field must name a field"),
        ({"url": "http://here", "action": "x"}, "action must be an object"),
        ({"url": "http://here", "action": {"a": 1}, "action_field": "a.b"}, "action_field: a of action is no object"),
    ],
)  # fmt: skip
def test_a_host_that_the_operator_does_not_name_and_a_wrong_setting_are_refused(
    config: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPENENV_HOSTS, "here:80,[::1]:80")
    with pytest.raises(ConfigError) as refused:
        make(World.OPENENV, config)
    assert said in str(refused.value)


@pytest.mark.parametrize("url", ["http://here", "ws://HERE:80/path", "http://[::1]"])
def test_an_allowed_host_is_the_same_however_it_is_written(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPENENV_HOSTS, "here:80,[::1]:80")
    make(World.OPENENV, {"url": url})


def test_no_host_is_allowed_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPENENV_HOSTS, raising=False)
    with pytest.raises(ConfigError, match="MILLRACE_OPENENV_HOSTS"):
        make(World.OPENENV, {"url": "http://127.0.0.1:8000"})
