"""Environment: what a plug-in is, and what it says. One file is a whole plug-in.

@dataclass
class Parrot:
    times: int = 3                                  # settings of the job: `config`

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        return Observation((Message("user", "Say something."),))

    def step(self, reply: str) -> Observation:
        self.times -= 1
        if self.times:
            return Observation((Message("user", reply),))
        return Observation(done=True, reward=1.0)

    def close(self) -> None: ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from services.common.errors import MillraceError

ROLES = ("user", "tool")


class BadObservation(MillraceError):  # noqa: N818  named after what it is
    """An environment returned what is no observation; the message says which field."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message for the policy."""

    role: Literal["user", "tool"]
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says at the start, or to a reply."""

    messages: tuple[Message, ...] = ()
    """At least one, unless it is done."""
    done: bool = False
    """Whether the episode is over."""
    reward: float | None = None
    """Of the whole episode where it is done, which needs one; before, of the turn that was answered, if it has one of its own."""
    accuracy: float | None = None
    """Of the whole episode, 0 to 1, before any shaping; None: 1 for a reward above 0, else 0."""
    detail: str = ""
    """Why, for people."""


class Environment(Protocol):
    """One episode, made with the job's `config` as keyword arguments.

    It acts on nothing outside itself: it may be killed at any moment, and begun anew. Where what it needs is away or full for the moment
    it raises EnvironmentUnavailable (services/common/errors.py), and is begun again a little later.
    """

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:
        """Begins: the same seed and task begin alike. `task`: the row's `extra_info`."""
        ...

    def step(self, reply: str) -> Observation:
        """Answers what the policy said."""
        ...

    def close(self) -> None:
        """Ends; it may not be called."""
        ...


Values = dict[str, Any]
"""An observation as MessagePack values."""


def values_of(observation: object) -> Values:
    """The values of an observation, which is checked by `observation_of` where it arrives. Raises BadObservation for another type."""
    if not isinstance(observation, Observation):
        raise BadObservation(f"it must return an Observation, not {type(observation).__name__}")
    messages = [[message.role, message.content] for message in observation.messages]
    return {
        "messages": messages, "done": observation.done, "reward": observation.reward, "accuracy": observation.accuracy,
        "detail": observation.detail,
    }  # fmt: skip


def observation_of(values: object, *, most_chars: int) -> Observation:
    """The observation with these values, whoever sent them. Raises BadObservation, which names the field."""
    match values:
        case {
            "messages": [*pairs],
            "done": bool(done),
            "reward": reward,
            "accuracy": accuracy,
            "detail": str(detail),
            **rest,
        } if not rest:
            messages = tuple(map(_message, pairs))
        case _:
            raise BadObservation("it returned no observation")
    _require_number("reward", reward, -math.inf, math.inf)
    _require_number("accuracy", accuracy, 0.0, 1.0)
    if (chars := sum(len(message.content) for message in messages) + len(detail)) > most_chars:
        raise BadObservation(f"messages: {chars} characters, and {most_chars} are the most")
    for message in messages:
        _require_unicode("messages", message.content)
    _require_unicode("detail", detail)
    if done and reward is None:
        raise BadObservation("reward: an episode that is done needs one")
    if not done and not messages:
        raise BadObservation("messages: the policy needs one to answer, unless the episode is done")
    return Observation(messages, done, None if reward is None else float(reward), accuracy, detail)


def _message(pair: object) -> Message:
    match pair:
        case ["user" | "tool" as role, str(content)]:
            return Message(role, content)
    raise BadObservation(f"messages: each has a role ({' or '.join(ROLES)}) and a text")


def _require_unicode(field: str, text: str) -> None:
    """Python's strings may have half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadObservation(f"{field}: no Unicode text: {error.reason}") from error


def _require_number(field: str, value: object, least: float, most: float) -> None:
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        bounds = "a finite number" if math.isinf(most) else f"a number from {least:g} to {most:g}"
        raise BadObservation(f"{field}: must be {bounds}, not {str(value)[:40]}")
