"""An environment that an OpenEnv server plays: one WebSocket, `<url>/ws`, is one episode there. Needs nothing of OpenEnv's package.

{"type": "reset", "data": {"seed": 7}}        ──►
                                              ◄──  {"type": "observation", "data": {"observation": {…}, "reward": null, "done": false}}
{"type": "step", "data": {"message": "Hi"}}   ──►
                                              ◄──  the same, or {"type": "error", "data": {"message": …, "code": …}}
{"type": "close"}                             ──►
"""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from services.common.errors import EnvironmentUnavailable, MillraceError
from services.environment.base import Message, Observation
from services.environment.switches import OPENENV_HOSTS, openenv_hosts
from services.environment.worlds.settings import require_seconds, require_text, require_whole

MESSAGE_BYTES = 1 << 20
CLOSE_S = 0.1
_FULL = "CAPACITY_REACHED"
"""OpenEnv's code of an error: no further session."""
_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}


class OpenEnvError(MillraceError):
    """An OpenEnv server does not answer as it should; the message names its URL."""


class OpenEnvUnavailable(OpenEnvError, EnvironmentUnavailable):  # noqa: N818  as its base
    """It cannot be reached, does not answer in time, or has all the sessions that it may have."""


@dataclass
class OpenEnv:
    """The defaults fit OpenEnv's echo environment; a field within a field is written `outer.inner`."""

    url: str = ""
    """Of the server; its host is one that the operator allows."""
    action: dict[str, Any] = field(default_factory=dict)
    """Fields of each action besides the text's."""
    action_field: str = "message"
    observation_field: str = "echoed_message"
    instructions: str = ""
    """First message, before what the server says at the start."""
    turns: int | None = None
    """Replies after which the episode is over, with the rewards so far; None: the server ends it."""
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 5.0
    _connection: ClientConnection | None = field(default=None, init=False)
    _open: ExitStack = field(default_factory=ExitStack, init=False)
    _replies: int = field(default=0, init=False)
    _reward: float | None = field(default=None, init=False)
    """Sum of the turns' rewards; None while there was none."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names the setting."""
        for name in ("url", "action_field", "observation_field", "instructions"):
            require_text(name, getattr(self, name))
        require_allowed(self.url)
        for name in ("connect_timeout_s", "answer_timeout_s"):
            require_seconds(name, getattr(self, name))
        if self.turns is not None:
            require_whole("turns", self.turns, 1, 1000)
        for name in ("action_field", "observation_field"):
            if not all(getattr(self, name).split(".")):
                raise ValueError(f"{name} must name a field, not {getattr(self, name)!r}")
        if not isinstance(self.action, dict):
            raise ValueError(f"action must be an object, not {self.action}")  # noqa: TRY004  as of any other wrong value
        _with_text(self.action, self.action_field, "")

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:  # noqa: ARG002  an `Environment`
        """Connects, and begins an episode there. Raises OpenEnvError."""
        self._connection = self._open.enter_context(self._connect())
        said = self._ask({"type": "reset", "data": {"seed": seed}})
        text = _text_at(said["observation"], self.observation_field)
        return self._observation(said, "\n\n".join(filter(None, [self.instructions, text])))

    def step(self, reply: str) -> Observation:
        """Sends the reply as an action. Raises OpenEnvError."""
        self._replies += 1
        said = self._ask({"type": "step", "data": _with_text(self.action, self.action_field, reply)})
        if said["reward"] is not None:
            self._reward = (self._reward or 0.0) + said["reward"]
        return self._observation(said, _text_at(said["observation"], self.observation_field))

    def close(self) -> None:
        """Ends the episode there."""
        if self._connection is not None:
            with suppress(OSError, WebSocketException):
                self._connection.send(json.dumps({"type": "close"}))
            self._open.close()

    def _observation(self, said: dict[str, Any], text: str) -> Observation:
        if not (said["done"] or self._replies == self.turns):
            if not text:
                raise OpenEnvError(f"{self.url} said no text in field {self.observation_field}")
            return Observation((Message("user", text),), reward=said["reward"])
        if self._reward is None and self._replies:
            raise OpenEnvError(f"{self.url} ended the episode without a reward")
        return Observation(done=True, reward=self._reward, detail=text)

    def _connect(self) -> ClientConnection:
        """A WebSocket to the allowed host alone: with a socket of ours no proxy and no redirect is followed."""
        parts = urlsplit(self.url)
        scheme = "wss" if parts.scheme in {"https", "wss"} else "ws"
        try:
            made = socket.create_connection((parts.hostname, _port(parts)), timeout=self.connect_timeout_s)
            return connect(
                f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws", sock=made, proxy=None, compression=None,
                open_timeout=self.connect_timeout_s, close_timeout=CLOSE_S, max_size=MESSAGE_BYTES,
            )  # fmt: skip
        except (OSError, ValueError, WebSocketException) as error:  # ValueError: a redirect
            raise _kind(error)(f"{self.url} cannot be reached: {type(error).__name__}: {error}") from error

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The server's answer: `observation`, `reward` and `done`."""
        if self._connection is None:
            raise OpenEnvError(f"{self.url} was not connected to")
        try:
            with suppress(ConnectionClosed):  # a server that is full has said so, and closed
                self._connection.send(json.dumps(message))
            answer = json.loads(self._connection.recv(timeout=self.answer_timeout_s))
        except TimeoutError as error:
            raise OpenEnvUnavailable(f"{self.url} did not answer within {self.answer_timeout_s:g} s") from error
        except (OSError, WebSocketException) as error:
            raise _kind(error)(f"{self.url} broke off: {type(error).__name__}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise OpenEnvError(f"{self.url} answered what is no JSON") from error
        return self._read(answer)

    def _read(self, answer: object) -> dict[str, Any]:
        match answer:
            case {"type": "observation", "data": {"observation": dict(observation), "done": bool(done), **rest}}:
                reward = rest.get("reward")
                if reward is None or isinstance(reward, int | float):
                    return {
                        "observation": observation,
                        "done": done,
                        "reward": None if reward is None else float(reward),
                    }
            case {"type": "error", "data": {"message": message, **rest}}:
                code = rest.get("code", "")
                kind = OpenEnvUnavailable if code == _FULL else OpenEnvError
                raise kind(f"{self.url} answered with an error: {code}: {message}"[:1000])
        raise OpenEnvError(f"{self.url} answered with what is no observation: {json.dumps(answer)[:200]}")


def _kind(error: Exception) -> type[OpenEnvError]:
    """What a broken connection is: whether another try may find the server there."""
    match error:
        case InvalidStatus():
            status = error.response.status_code
            passing = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
        case ConnectionClosed():
            passing = error.sent is None or error.sent.code != CloseCode.MESSAGE_TOO_BIG
        case _:  # InvalidMessage: it closed before it spoke
            passing = isinstance(error, OSError | InvalidMessage)
    return OpenEnvUnavailable if passing else OpenEnvError


def require_allowed(url: str) -> None:
    """Raises ValueError for what is no address of a server, and for a host that the operator does not allow."""
    try:
        parts = urlsplit(url)
        where = (
            f"[{parts.hostname}]:{_port(parts)}"
            if ":" in (parts.hostname or "")
            else f"{parts.hostname}:{_port(parts)}"
        )
    except (ValueError, KeyError):
        parts, where = urlsplit(""), ""
    if not parts.hostname:
        raise ValueError(f"url must be an http, https, ws or wss address, not {url!r}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("url has a user, a query or a fragment")
    if where not in openenv_hosts():
        raise ValueError(f"url: jobs may not reach {where} from this server: its operator adds it to {OPENENV_HOSTS}")


def _port(parts: SplitResult) -> int:
    return _PORTS[parts.scheme] if parts.port is None else parts.port


def _text_at(observation: Mapping[str, Any], path: str) -> str:
    """The text in a field, which may be one within others; empty where there is none. Other values are shown as JSON."""
    value: Any = observation
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _with_text(action: Mapping[str, Any], path: str, text: str) -> dict[str, Any]:
    """The action with the text in its field. Raises ValueError where that lies within what is no object."""
    made = copy.deepcopy(dict(action))
    *outer, last = path.split(".")
    inner = made
    for name in outer:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"action_field: {name} of action is no object")  # noqa: TRY004  as of any other wrong value
    inner[last] = text
    return made


ENVIRONMENT = OpenEnv
