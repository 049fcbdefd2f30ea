"""From messages to token ids and back, through the model's own tokenizer and chat template. Runs no code of the model's directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import MillraceError, ModelError
from services.common.types import Message


class PromptError(MillraceError):
    """A prompt that this model's chat template refuses, or that is too long; the group fails, nothing else."""


class PromptEncoder:
    """One model's tokenizer."""

    def __init__(self, model_dir: Path) -> None:
        """Loads the tokenizer.

        Raises:
            ModelError: there is none, it cannot be read, or it has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                model_dir, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            raise ModelError(f"{model_dir}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelError(f"{model_dir}: the tokenizer has no chat template (chat_template.jinja)")

    def encode(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of the prompt, up to where the assistant begins to speak.

        Raises:
            PromptError: the template refuses the messages (their order, a role), or makes nothing of them.
        """
        from jinja2 import TemplateError

        chat = [{"role": message.role, "content": message.content} for message in messages]
        if not chat:  # on which transformers' releases differ
            raise PromptError("the model's chat template refuses a prompt without messages")
        try:
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise PromptError(f"the model's chat template refuses the prompt: {error}") from error
        return self._token_ids(text, special=False)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that is continued as it stands, begun as the model's texts begin.

        Raises:
            PromptError: the text has no tokens.
        """
        return self._token_ids(text, special=True)

    def decode(self, rollouts: Sequence[Sequence[int]]) -> list[str]:
        """The rollouts' texts, special tokens left out."""
        return list(self._tokenizer.batch_decode(list(rollouts), skip_special_tokens=True))

    def _token_ids(self, text: str, *, special: bool) -> list[int]:
        token_ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        if not token_ids:
            raise PromptError("the prompt has no tokens")
        return token_ids
