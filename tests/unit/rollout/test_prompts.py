"""Prompts through a real tokenizer; the model directory is read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.common.errors import ModelError
from services.common.types import Message
from services.rollout.prompts import PromptEncoder, PromptError

WORDS = {"?": 0, "<s>": 1, "ask:": 2, "one": 3, "two": 4, "say:": 5}
TEMPLATE = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    "{% for m in messages %}ask: {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}say:{% endif %}"
)


def save(folder: Path, template: str | None) -> Path:
    core = Tokenizer(models.WordLevel(WORDS, unk_token="?"))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="<s>", chat_template=template)  # noqa: S106
    made.save_pretrained(folder)
    return folder


def test_a_prompt_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    encoder = PromptEncoder(save(tmp_path, TEMPLATE))
    assert encoder.encode([Message("user", "one two")]) == [2, 3, 4, 5]


def test_special_tokens_are_not_in_the_text(tmp_path: Path) -> None:
    encoder = PromptEncoder(save(tmp_path, TEMPLATE))
    assert encoder.decode([[3, 4, 1], []]) == ["one two", ""]


def test_a_prompt_that_the_template_refuses_says_why(tmp_path: Path) -> None:
    encoder = PromptEncoder(save(tmp_path, TEMPLATE))
    with pytest.raises(PromptError, match="begin with the user"):
        encoder.encode([Message("system", "one")])
    with pytest.raises(PromptError, match="refuses"):
        encoder.encode([])


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        PromptEncoder(save(tmp_path, None))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        PromptEncoder(tmp_path)
