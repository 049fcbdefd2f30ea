"""Conversations: rows of instructions, of chats and of preference pairs, as a prompt and a reference answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import DataError

Cells = Mapping[str, Any]
"""A row's values by role."""
Messages = list[dict[str, str]]

_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its reference answer."""

    prompt: Messages
    ground_truth: Any
    """Text or a number; None where the row has none."""
    extra: dict[str, Any] = field(default_factory=dict)


def user(text: str) -> Messages:
    """A prompt of one message."""
    return [{"role": "user", "content": text}]


def text_of(cells: Cells, role: str) -> str:
    """The text of a role. Raises DataError when it is missing or empty."""
    value = cells.get(role)
    if not isinstance(value, str) or not value.strip():
        found = (
            "empty" if isinstance(value, str) else "missing" if value is None else f"no text but {type(value).__name__}"
        )
        raise DataError(f"the column of `{role}` is {found}")
    return value


def messages_of(value: object, name: str) -> Messages:
    """Messages, in either spelling: role and content, or from and value. A text is a user's message. Raises DataError."""
    if isinstance(value, str) and value.strip():
        return user(value)
    if not isinstance(value, list) or not value:
        raise DataError(f"the column of `{name}` is no text and no list of messages")
    messages = []
    for number, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise DataError(f"message {number} is no object")
        speaker, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if speaker not in _SPEAKERS or not isinstance(content, str):
            raise DataError(
                f"message {number} has the role {speaker!r}; it must be one of {', '.join(_SPEAKERS)}, with a text"
            )
        messages.append({"role": _SPEAKERS[speaker], "content": content})
    return messages


def with_system(cells: Cells, messages: Messages) -> Messages:
    """The messages after the row's own system message, if it has one."""
    system = cells.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def read_alpaca(cells: Cells) -> Sample:
    """An instruction with an optional input, history and system message; the output is the reference answer."""
    response = cells.get("response")
    if isinstance(response, Mapping):
        response = response.get("ground_truth")
    if isinstance(response, list):
        response = response[0] if response else None
    return Sample(_instruction(cells), response)


def read_pair(cells: Cells) -> Sample:
    """An instruction with a better and a worse answer: the better one is the reference."""
    return Sample(_instruction(cells), _answer(cells, "chosen"), {"rejected": _answer(cells, "rejected")})


def read_chat(cells: Cells) -> Sample:
    """A conversation; its last answer, if it ends in one, is the reference unless the row has another."""
    role, value = next(
        ((role, cells[role]) for role in ("prompt", "query", "history") if cells.get(role)), ("prompt", None)
    )
    messages = with_system(cells, messages_of(value, role))
    truth = cells.get("response")
    if messages[-1]["role"] == "assistant":
        truth = messages[-1]["content"] if truth is None else truth
        messages = messages[:-1]
    if not any(message["role"] == "user" for message in messages):
        raise DataError("the conversation has no user message")
    return Sample(messages, truth)


def read_transcript(cells: Cells) -> Sample:
    """A preference pair of whole transcripts (`Human:`, `Assistant:`), or a prompt's transcript and two answers."""
    chosen, rejected = cells.get("chosen"), cells.get("rejected")
    if isinstance(chosen, list):  # messages
        messages, worse = messages_of(chosen, "chosen"), messages_of(rejected, "rejected")
        return Sample(messages[:-1], messages[-1]["content"], {"rejected": worse[-1]["content"]})
    chosen, rejected = text_of(cells, "chosen"), text_of(cells, "rejected")
    if cells.get("prompt"):
        messages = _turns(text_of(cells, "prompt"))
    else:
        messages, chosen, rejected = _turns(chosen), _last_turn(chosen), _last_turn(rejected)
    return Sample(messages, chosen.strip(), {"rejected": rejected.strip()})


def _turns(transcript: str) -> Messages:
    """The turns before the last answer, which may be open."""
    _, *parts = _TURN.split(f"\n\n{transcript.lstrip()}")
    messages = [
        {"role": "user" if speaker == "Human" else "assistant", "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise DataError("the transcript has no `Human:` turn before its last answer")
    return messages


def _last_turn(transcript: str) -> str:
    return transcript.rpartition("\n\nAssistant:")[2]


def _instruction(cells: Cells) -> Messages:
    parts = [text_of(cells, "prompt")]
    if isinstance(query := cells.get("query"), str) and query.strip():
        parts.append(query)
    history = [
        {"role": role, "content": str(text)}
        for turn in cells.get("history") or []
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return with_system(cells, [*history, *user("\n".join(parts))])


def _answer(cells: Cells, role: str) -> str:
    value = cells.get(role)
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = value.get("content", value.get("value"))
    return text_of({role: value}, role)
