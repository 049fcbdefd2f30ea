"""Prompts: from messages to token ids and back, by the model's own tokenizer and chat template. Runs no code of the model's directory.

Tokenizer and template come with a job, so this runs in a child process (a rollout server's, or that of the checks of a new job), and every
error that they or the libraries raise becomes one with a readable reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from services.common.errors import ModelError, PromptError
from services.common.models.transcript import ANSWERED, ASKED, check_append_only

CHARACTERS_PER_TOKEN = 64
"""A prompt with more characters per token of the context is refused as too long without tokenizing it."""

Messages = Sequence[tuple[str, str]]
"""Role and content of each."""
Prompt = tuple[Messages, int]
"""And the longest text that the template may produce, characters."""
Bridge = tuple[Messages, int, int]
"""And the last token that was sampled before them; then as of a prompt."""
Tried = tuple[list[int] | None, str]
"""Token ids, or None and the reason of the PromptError."""


def prepare() -> None:
    """Imports the tokenizer libraries, in the forkserver, without torch: its import takes seconds and 260 MiB, and is not needed."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # such as that torch is missing
    sys.modules["torch"] = None  # type: ignore[assignment]
    import jinja2.sandbox  # noqa: F401
    import tokenizers  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401  lazy: these names load their modules


class PromptEncoder:
    """One model's tokenizer. Arguments and results are MessagePack values."""

    def __init__(self, model_dir: Path | str, chat_template: str | None = None) -> None:
        """Loads the tokenizer. `chat_template`: in place of its own.

        Raises ModelError when the tokenizer is missing, cannot be read, or has no chat template.
        """
        from transformers import AutoTokenizer

        options = {"trust_remote_code": False, "local_files_only": True}
        with _library_errors(ModelError, f"{model_dir}: the tokenizer cannot be loaded"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, **options)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelError(f"{model_dir}: the tokenizer has no chat template (chat_template.jinja)")

    def encode(self, messages: Messages, most_chars: int) -> list[int]:
        """Token ids of the prompt, generation prompt included; `messages` and errors as of `render`."""
        return self.token_ids(self.render(messages, most_chars))

    def render(self, messages: Messages, most_chars: int) -> str:
        """The prompt as the chat template writes it, generation prompt included; `messages`: role and content of each.

        Raises:
            PromptError: the template refuses the messages (their order, a role), or its text is empty or too long.
        """
        text = self._render(messages)
        if len(text) > most_chars:
            made = f"{len(text)} characters of the prompt, far more than the context holds"
            raise PromptError(f"the model's chat template makes {made}")
        return text

    def token_ids(self, rendered: str) -> list[int]:
        """Token ids of a prompt that `render` has written. Raises PromptError when there are none."""
        return self._token_ids(rendered, special=False)

    def encode_all(self, prompts: Sequence[Prompt]) -> list[Tried]:
        """`encode` of each prompt."""
        return [_tried(self.encode, *prompt) for prompt in prompts]

    def bridge(self, messages: Messages, last: int, most_chars: int) -> list[int]:
        """Token ids between a sampled turn and the next one (`transcript`): the messages that answer it, and the generation prompt.

        `last`: the last sampled token. Where it is not the template's end-of-turn token (a turn that was cut, or that ended with another
        of the model's end tokens), that comes first. Raises PromptError when the template refuses the messages, their text is too long, or
        it does not append.
        """
        if sum(len(content) for _, content in messages) > most_chars:
            raise PromptError(f"the messages have more than {most_chars} characters, far more than the context holds")
        end_of_turn, text = self.end_of_turn, self._render([("user", ASKED), ("assistant", ANSWERED), *messages])
        token_ids = self._token_ids(text.partition(ANSWERED)[2], special=False)
        if token_ids[0] != end_of_turn:
            raise PromptError("the model's chat template closes an answer otherwise when messages follow it")
        return token_ids[1:] if last == end_of_turn else token_ids

    def bridge_all(self, bridges: Sequence[Bridge]) -> list[Tried]:
        """`bridge` of each."""
        return [_tried(self.bridge, *bridge) for bridge in bridges]

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template writes after an answer, over which nothing merges. Raises PromptError when there is none."""
        text = self._render([("user", ASKED), ("assistant", ANSWERED)], generation=False)
        _, answer, closing = text.rpartition(ANSWERED)
        if not answer:
            raise PromptError("the model's chat template does not write an answer as it is")
        token_ids = self._token_ids(closing, special=False) if closing.strip() else []
        with _library_errors(PromptError, "the model's tokenizer does not list its added tokens"):
            added = self._tokenizer.added_tokens_decoder
        if not token_ids or token_ids[0] not in added:
            closed = f"with a special token, but with {closing[:40]!r}"
            raise PromptError(f"the model's chat template does not close an answer {closed}")
        return token_ids[0]

    @property
    def end_tokens(self) -> set[int]:
        """The tokenizer's own end token, if it has one; the model's configuration may name more."""
        return set() if self._tokenizer.eos_token_id is None else {int(self._tokenizer.eos_token_id)}

    def check_append_only(self, name: str, roles: Sequence[str]) -> None:
        """Raises ModelError, which names the model, unless transcripts in which these roles answer only grow (`transcript`)."""
        check_append_only(self, name, roles)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text, special tokens as in the model's texts. Raises PromptError when there are none."""
        return self._token_ids(text, special=True)

    def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """Texts of the rollouts, without special tokens. Raises PromptError when the tokenizer refuses them."""
        with _library_errors(PromptError, "the model's tokenizer cannot decode the answers"):
            return list(self._tokenizer.batch_decode(list(rollouts), skip_special_tokens=True))

    def decode_raw(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token ids, special tokens included. Raises PromptError when the tokenizer refuses them."""
        with _library_errors(PromptError, "the model's tokenizer cannot decode the tokens"):
            return list(self._tokenizer.batch_decode(list(sequences), clean_up_tokenization_spaces=False))

    def _render(self, messages: Messages, *, generation: bool = True) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        if not chat:  # releases of transformers differ here
            raise PromptError("the model's chat template refuses a prompt without messages")
        with _library_errors(PromptError, "the model's chat template refuses the prompt"):
            text: str = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
        return text

    def _token_ids(self, text: str, *, special: bool) -> list[int]:
        with _library_errors(PromptError, "the model's tokenizer refuses the prompt"):
            token_ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        if not token_ids:
            raise PromptError("the prompt has no tokens")
        return token_ids


def _tried(make: Callable[..., list[int]], *arguments: object) -> Tried:
    try:
        return make(*arguments), ""
    except PromptError as error:
        return None, str(error)


@contextmanager
def _library_errors(kind: type[ModelError | PromptError], failure: str) -> Iterator[None]:
    """Raises every error of the body as one of this kind; only out of memory stays, and ends the child."""
    from jinja2 import TemplateError

    try:
        yield
    except MemoryError:
        raise
    except TemplateError as error:
        raise kind(f"{failure}: {error}") from error
    except BaseException as error:  # a bare Exception too; a panic of tokenizers is no Exception
        raise kind(f"{failure}: {type(error).__name__}: {error}") from error
