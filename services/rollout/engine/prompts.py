"""From messages to token ids and back, through the model's own tokenizer and chat template. Runs no code of the model's directory.

Tokenizer and template are what a job brought, so this runs in a child process (`prompt_process`): whatever they do, and
whatever the libraries raise over it, is an error with the reason in words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.common.errors import ModelError, PromptError

T = TypeVar("T")

CHARACTERS_PER_TOKEN = 64
"""A prompt with more characters than this for each token of the context is too long without being counted."""


def prepare() -> None:
    """Imports what a tokenizer needs, for the forkserver. It needs no torch, whose import takes seconds and 260 MiB."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]
    import jinja2.sandbox  # noqa: F401
    import tokenizers  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401  imported when they are named


def open_encoder(model_dir: str) -> PromptEncoder:
    """The encoder of a model's directory, for the sandbox."""
    return PromptEncoder(Path(model_dir))


class PromptEncoder:
    """One model's tokenizer. Takes and gives MessagePack values."""

    def __init__(self, model_dir: Path) -> None:
        """Loads the tokenizer.

        Raises:
            ModelError: there is none, it cannot be read, or it has no chat template.
        """
        from transformers import AutoTokenizer

        self._tokenizer: Any = _tried(
            lambda: AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True),
            ModelError,
            f"{model_dir}: the tokenizer cannot be loaded",
        )
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelError(f"{model_dir}: the tokenizer has no chat template (chat_template.jinja)")

    def encode(self, messages: Sequence[tuple[str, str]], most_chars: int) -> list[int]:
        """Token ids of the prompt, up to where the assistant begins to speak.

        Args:
            messages: role and content of each.
            most_chars: longest text that the template may make of them.

        Raises:
            PromptError: the template refuses the messages (their order, a role), or makes nothing, or too much, of them.
        """
        chat = [{"role": role, "content": content} for role, content in messages]
        if not chat:  # on which transformers' releases differ
            raise PromptError("the model's chat template refuses a prompt without messages")
        text = _tried(
            lambda: self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            PromptError,
            "the model's chat template refuses the prompt",
        )
        if len(text) > most_chars:
            raise PromptError(
                f"the model's chat template makes {len(text)} characters of the prompt, far more than the context holds"
            )
        return self._token_ids(text, special=False)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that is continued as it stands, begun as the model's texts begin.

        Raises:
            PromptError: the text has no tokens.
        """
        return self._token_ids(text, special=True)

    def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """The rollouts' texts, special tokens left out.

        Raises:
            PromptError: the tokenizer does not take them.
        """
        return _tried(
            lambda: list(self._tokenizer.batch_decode(list(rollouts), skip_special_tokens=True)),
            PromptError,
            "the model's tokenizer cannot decode the answers",
        )

    def _token_ids(self, text: str, *, special: bool) -> list[int]:
        token_ids = _tried(
            lambda: list(self._tokenizer(text, add_special_tokens=special)["input_ids"]),
            PromptError,
            "the model's tokenizer refuses the prompt",
        )
        if not token_ids:
            raise PromptError("the prompt has no tokens")
        return token_ids


def _tried(work: Callable[[], T], kind: type[ModelError | PromptError], what: str) -> T:
    """What the libraries make of it; whatever they raise is an error of this kind. Being out of memory is the child's own end."""
    from jinja2 import TemplateError

    try:
        return work()
    except MemoryError:
        raise
    except TemplateError as error:
        raise kind(f"{what}: {error}") from error
    except BaseException as error:  # a bare Exception, and the panics of tokenizers, which are no Exception
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
