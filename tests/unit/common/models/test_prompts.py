"""Prompts through a real tokenizer; the model directory is read, never run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.common.errors import ModelError, PromptError
from services.common.models.prompts import PromptEncoder

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
    assert encoder.encode([("user", "one two")], 1000) == [2, 3, 4, 5]


def test_special_tokens_are_not_in_the_text(tmp_path: Path) -> None:
    encoder = PromptEncoder(save(tmp_path, TEMPLATE))
    assert encoder.decode([[3, 4, 1], []]) == ["one two", ""]


def test_a_prompt_that_the_template_refuses_says_why(tmp_path: Path) -> None:
    encoder = PromptEncoder(save(tmp_path, TEMPLATE))
    with pytest.raises(PromptError, match="begin with the user"):
        encoder.encode([("system", "one")], 1000)
    with pytest.raises(PromptError, match="refuses"):
        encoder.encode([], 1000)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        PromptEncoder(save(tmp_path, None))


def test_the_jobs_own_template_takes_the_place_of_the_models(tmp_path: Path) -> None:
    own = "{% for m in messages %}say: {{ m['content'] }}{% endfor %}"
    for folder, template in (("with", TEMPLATE), ("without", None)):
        encoder = PromptEncoder(save(tmp_path / folder, template), own)
        assert encoder.render([("user", "one two")], 1000) == "say: one two"
        assert encoder.encode([("user", "one two")], 1000) == [5, 3, 4]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        PromptEncoder(tmp_path)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "the model's chat template refuses the prompt: ZeroDivisionError: division by zero"),
        ("{{ messages.nothing.at.all }}", "has no attribute 'nothing'"),
        ("{{ undefined_function() }}", "'undefined_function' is undefined"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ 'a' * 100000 }}", "makes 100000 characters of the prompt"),
        ("{{ '' }}", "the prompt has no tokens"),
    ],
)
def test_a_template_that_fails_fails_the_prompt_with_its_reason(tmp_path: Path, template: str, reason: str) -> None:
    encoder = PromptEncoder(save(tmp_path, template))
    with pytest.raises(PromptError, match=re.escape(reason)):
        encoder.encode([("user", "one")], 1000)


def test_answers_that_the_tokenizer_does_not_take_fail_the_prompt(tmp_path: Path) -> None:
    encoder = PromptEncoder(save(tmp_path, TEMPLATE))
    with pytest.raises(PromptError, match="cannot decode the answers: OverflowError"):
        encoder.decode([[-1]])
