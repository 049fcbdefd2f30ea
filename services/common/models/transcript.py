"""Transcripts: what the chat template writes between two turns that the policy samples. A sampled turn is never tokenized again.

    prompt │ sampled │ bridge │ sampled │ bridge │ …       bridge = end of the turn + new messages + generation prompt

A bridge is what the template writes after a stand-in for the sampled turn. It begins with the token that ends a turn, over which no
tokenizer merges, so that its ids are those that stand there in a whole transcript too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

from services.common.errors import ModelError, PromptError

Chat = Sequence[tuple[str, str]]
"""Role and content of each message."""

ASKED, ANSWERED = "stand-in.question", "stand-in.answer"
"""Contents that no template changes, or writes of its own accord."""
TURNS = 4
"""Of the conversations that are tried: enough for a template that rewrites only what lies further back."""
MAX_CHARS = 262_144
"""Of what the template makes of such a conversation."""
_SHOWN_TOKENS = 8


class Encoder(Protocol):
    """A chat template with its tokenizer: `prompts.PromptEncoder`, whose methods these are."""

    def render(self, messages: Chat, most_chars: int) -> str: ...  # noqa: D102
    def token_ids(self, rendered: str) -> list[int]: ...  # noqa: D102
    def bridge(self, messages: Chat, last: int, most_chars: int) -> list[int]: ...  # noqa: D102
    def decode_raw(self, sequences: Sequence[Sequence[int]]) -> list[str]: ...  # noqa: D102


class _Reply(NamedTuple):
    content: str
    thought: str
    answer: str


def check_append_only(encoder: Encoder, name: str, roles: Sequence[str]) -> None:
    """Checks that every transcript begins as the one before it, when these roles answer the policy, whether it thinks or not.

    Raises:
        ModelError: the template rewrites an earlier turn; names the model and the first token that differs. Or it does not take a role.
    """
    try:
        for role in roles:
            _check_role(encoder, role)
        for thinks in (False, True):
            _check_conversation(encoder, name, roles, thinks=thinks)
    except PromptError as error:
        raise ModelError(f"{name}: {' '.join(str(error).split())}") from error


def _check_role(encoder: Encoder, role: str) -> None:
    said = "stand-in.observation"
    try:
        text = encoder.render([("user", ASKED), ("assistant", ANSWERED), (role, said)], MAX_CHARS)
    except PromptError as error:
        raise PromptError(f"messages of role {role!r}: {error}") from error
    if said not in text:
        raise PromptError(f"the model's chat template leaves out or changes messages of role {role!r}")


def _check_conversation(encoder: Encoder, name: str, roles: Sequence[str], *, thinks: bool) -> None:
    """The prompt of each turn must be that of the turn before, the reply, and the bridge."""
    chat = [("user", "Begin.")]
    prompt = encoder.render(chat, MAX_CHARS)
    for turn in range(1, TURNS + 1):
        reply, message = _reply(turn, thinks=thinks), (roles[turn % len(roles)], f"Observed {turn}.")
        chat += [("assistant", reply.content), message]
        longer = encoder.render(chat, MAX_CHARS)
        expected = encoder.token_ids(prompt + _written(longer.removeprefix(prompt), reply))
        expected += encoder.bridge([message], expected[-1], MAX_CHARS)
        if difference := _difference(encoder, expected, encoder.token_ids(longer)):
            rewrites = "its chat template rewrites earlier turns, which were sampled as they are"
            raise ModelError(
                f"{name}: {rewrites}: after turn {turn} {difference} (model.chat_template sets another template)"
            )
        prompt = longer


def _reply(turn: int, *, thinks: bool) -> _Reply:
    thought, answer = f"Thought {turn}." if thinks else "", f"Answer {turn}."
    return _Reply(f"<think>\n{thought}\n</think>\n\n{answer}" if thinks else answer, thought, answer)


def _written(text: str, reply: _Reply) -> str:
    """The reply as the template writes it after its prompt, perhaps with spaces or an empty thought; as it is if a part is left out."""
    before, answer, _ = text.partition(reply.answer)
    return before + answer if answer and reply.thought in before else reply.content


def _difference(encoder: Encoder, expected: Sequence[int], found: Sequence[int]) -> str:
    """Number and text of the first token that differs, with some that follow; empty if none does."""
    at = next((at for at, (old, new) in enumerate(zip_longest(expected, found)) if old != new), None)
    if at is None:
        return ""
    there, here = encoder.decode_raw([ids[at : at + _SHOWN_TOKENS] for ids in (expected, found)])
    return f"token {at} is that of {here!r} in place of {there!r}"
