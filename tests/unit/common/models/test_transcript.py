"""Transcripts only grow: every sampled token stays as it was, and what stands between two turns is the template's own text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo.charlm_tokenizer import make_tokenizer, save_tokenizer
from services.common.errors import ModelError, PromptError
from services.common.models.prompts import PromptEncoder

MOST = 10_000
# The templates behave as those of the families that they are named after; the words are ours.
CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5: a line break after the end of a turn, and tools that answer as a user does."""
HEADERS = (
    "<|begin|>{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
"""Llama 3: headers, and nothing after the end of a turn."""
FORGETFUL = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and loop.index0 < last.user %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3: the thoughts of earlier turns are left out when a user speaks again."""
MANNERED = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
"""No special token closes a turn."""
NO_TOOLS = CHATML.replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|stop|>", "<|eot|>")
ENDS = {CHATML: "<|im_end|>", HEADERS: "<|eot|>"}
TEXTS = st.text(st.sampled_from("abc \n<>|é"), max_size=8)


@cache
def encoder(template: str) -> PromptEncoder:
    """A tokenizer made to be ambiguous: runs of a, b and c merge in several ways, so that text has other tokens than were sampled."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "abc" for b in "abc"] + [(f"{a}{b}", c) for a in "abc" for b in "abc" for c in "abc"]
    tokens = [*letters, *dict.fromkeys("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    folder = Path(mkdtemp())
    made: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)  # noqa: S106
    made.save_pretrained(folder)
    return PromptEncoder(folder)


def sampled_ids(text: str) -> list[int]:
    """The most tokens that a policy can say the text with: one for each byte."""
    return [
        token for letter in text for token in encoder(CHATML)._tokenizer(letter, add_special_tokens=False)["input_ids"]
    ]


def played(template: str, turns: Sequence[tuple[str, str, str]], *, ended: bool = True) -> list[int]:
    """A transcript as the rollout service builds it: a prompt, then turn, answer and bridge; each a reply, a role and its message."""
    made = encoder(template)
    (end,) = made._tokenizer(ENDS[template], add_special_tokens=False)["input_ids"]
    ids = made.encode([("user", "go")], MOST)
    for reply, role, message in turns:
        ids += sampled_ids(reply) + ([end] if ended else [])
        ids += made.bridge([(role, message)], ended, MOST)
    return ids


@pytest.mark.parametrize("template", list(ENDS), ids=["chatml", "headers"])
@given(
    turns=st.lists(
        st.tuples(st.text("abc", max_size=6), st.sampled_from(["user", "tool"]), TEXTS), min_size=1, max_size=3
    )
)
@settings(max_examples=60, deadline=None)
def test_a_transcript_of_bridges_is_the_templates_own_text(template: str, turns: list[tuple[str, str, str]]) -> None:
    chat = [("user", "go")]
    for reply, role, message in turns:
        chat += [("assistant", reply), (role, message)]
    (text,) = encoder(template).decode_raw([played(template, turns)])
    assert text == encoder(template).render(chat, MOST)
    assert played(template, turns, ended=False) == played(template, turns), (
        "a turn that was cut is closed as the template does"
    )


@given(reply=st.text("abc", min_size=2, max_size=6), message=TEXTS)
@settings(max_examples=60, deadline=None)
def test_sampled_tokens_stay_as_they_were_where_text_would_have_others(reply: str, message: str) -> None:
    made, first = encoder(CHATML), encoder(CHATML).encode([("user", "go")], MOST)
    ids = played(CHATML, [(reply, "user", message)])
    assert ids[len(first) : len(first) + len(reply)] == sampled_ids(reply)
    again = made.encode([("user", "go"), ("assistant", reply), ("user", message)], MOST)
    assert again != ids, "a tokenizer that is asked again gives other tokens: the property above is no matter of course"


def test_a_bridge_depends_on_the_messages_and_on_the_end_of_the_turn_alone() -> None:
    made = encoder(CHATML)
    (end,) = made._tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    closed = made.bridge([("user", "cab")], True, MOST)
    assert made.bridge([("user", "cab")], False, MOST) == [end, *closed]
    assert made.decode_raw([closed]) == ["\n<|im_start|>user\ncab<|im_end|>\n<|im_start|>assistant\n"]
    assert made.decode_raw([encoder(HEADERS).bridge([("tool", "cab")], True, MOST)]) == [
        "<|start|>ipython<|stop|>\n\ncab<|eot|><|start|>assistant<|stop|>\n\n"
    ]


def test_messages_that_are_too_long_are_not_rendered() -> None:
    with pytest.raises(PromptError, match="more than 10 characters"):
        encoder(CHATML).bridge([("user", "a" * 11)], True, 10)


@pytest.mark.parametrize("template", list(ENDS), ids=["chatml", "headers"])
def test_templates_that_append_are_accepted_for_users_and_tools(template: str) -> None:
    encoder(template).check_append_only("model", ["user", "tool"])


def test_a_template_that_forgets_thoughts_is_refused_with_the_first_token_that_differs() -> None:
    with pytest.raises(
        ModelError, match=r"^qwen: its chat template rewrites earlier turns.* at token \d+ it writes 'answer"
    ) as refused:
        encoder(FORGETFUL).check_append_only("qwen", ["user"])
    assert "in place of '<think>" in str(refused.value)
    encoder(FORGETFUL).check_append_only("qwen", ["tool"])  # which forgets nothing


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^model: .*does not close an answer with a special token"):
        encoder(MANNERED).check_append_only("model", ["user"])


def test_a_template_that_refuses_the_role_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^model: .*no tools"):
        encoder(NO_TOOLS).check_append_only("model", ["tool"])


def test_the_demos_model_takes_turns_with_users_and_tools(tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(256), tmp_path)
    made = PromptEncoder(tmp_path)
    made.check_append_only("tiny", ["user", "tool"])
    assert made.decode_raw([made.bridge([("user", "higher")], True, MOST)]) == ["<|user|>higher<|assistant|>"]
