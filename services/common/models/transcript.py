"""Transcripts: what the chat template writes between two turns that the policy samples. A sampled turn is never tokenized again.

    prompt │ sampled │ bridge │ sampled │ bridge │ …       bridge = end of the turn + new messages + generation prompt

A bridge is the template's text for a stand-in conversation with the new messages, less its text without them. It begins at a special
token, over which no tokenizer merges, so that its ids are those that stand there in a whole transcript too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from services.common.errors import ModelError, PromptError

Chat = Sequence[tuple[str, str]]
"""Role and content of each message."""
Render = Callable[[Chat, bool], str]
"""The template's text of a chat, with the generation prompt or without it."""

ASKED, ANSWERED, THOUGHT = "question", "answer", "<think>\nthought\n</think>\n\nanswer"
"""Contents of stand-ins, which no template changes."""
_SHOWN_CHARS = 40


def bridge_text(render: Render, messages: Chat, *, ended: bool, specials: Sequence[str]) -> str:
    """The text after a sampled turn, up to the next one.

    `ended`: the turn was sampled with its last token; one that was cut is closed first. `specials`: the texts of special tokens.

    Raises:
        PromptError: the template does not close an answer with a special token, or rewrites it when messages follow.
    """
    before = render([("user", ASKED), ("assistant", ANSWERED)], False)
    after = render([("user", ASKED), ("assistant", ANSWERED), *messages], True)
    if not after.startswith(before):
        raise PromptError("the model's chat template rewrites a turn when messages follow it")
    closing = before[before.rindex(ANSWERED) + len(ANSWERED) :]
    end = max((text for text in specials if text and closing.startswith(text)), key=len, default="")
    if not end:
        raise PromptError(
            f"the model's chat template does not close an answer with a special token, but with {closing[:_SHOWN_CHARS]!r}"
        )
    return (closing.removeprefix(end) if ended else closing) + after[len(before) :]


def check_append_only(render: Render, token_ids: Callable[[str], list[int]], name: str, roles: Sequence[str]) -> None:
    """Checks that every transcript begins as the one before it, whatever `roles` answer the policy, and whatever it says.

    Raises:
        ModelError: the template rewrites an earlier turn; names the model and the first token that differs. Or it refuses a role.
    """
    for role in roles:
        for answer in (ANSWERED, THOUGHT):
            chat: list[tuple[str, str]] = [("user", ASKED)]
            for _ in range(3):
                asked = render(chat, True)
                chat.append(("assistant", answer))
                answered = render(chat, False)
                _require_begin(asked + answer, answered, token_ids, name)
                chat.append((role, ASKED))
                _require_begin(answered, render(chat, True), token_ids, name)


def _require_begin(before: str, after: str, token_ids: Callable[[str], list[int]], name: str) -> None:
    if after.startswith(before):
        return
    wanted, found = token_ids(before), token_ids(after)
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found)))
    place = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    there, here = (text[place : place + _SHOWN_CHARS] for text in (before, after))
    raise ModelError(
        f"{name}: its chat template rewrites earlier turns, which were sampled as they are: at token {at} it writes {here!r} in place of "
        f"{there!r} when another turn follows (model.chat_template sets another template)"
    )


def special_texts(tokenizer: Any) -> list[str]:  # noqa: ANN401  transformers is untyped here
    """The texts of all tokens over which the tokenizer merges nothing."""
    return [str(token) for token in tokenizer.get_added_vocab()]
