"""Transcripts only grow: every sampled token stays as it was, and what stands between two turns is the template's own text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo.charlm_tokenizer import make_tokenizer, save_tokenizer
from services.common.errors import ModelError, PromptError
from services.common.models.prompts import PromptEncoder
from tests.unit.common.models.chat_templates import (
    ALL_THOUGHTS,
    CHATML,
    ENDS,
    HEADERS,
    MANNERED,
    MOST,
    NAMED,
    NO_TOOLS,
    OPENED,
    SPACED,
    SPECIALS,
    THINKER,
    encoder,
)

TEXTS = st.text(st.sampled_from("abc \n<>|é"), max_size=8)
OTHER = 0
"""A token that ends no turn."""
VOCABULARY = 256 + 4 + 9 + 27 + len(SPECIALS)


def sampled_ids(text: str) -> list[int]:
    """The most tokens that a policy can say the text with: one for each byte."""
    return [
        token for letter in text for token in encoder(CHATML)._tokenizer(letter, add_special_tokens=False)["input_ids"]
    ]


def played(template: str, turns: Sequence[tuple[str, str, str]], *, ended: bool = True) -> list[int]:
    """A transcript as the rollout service builds it: a prompt, then turn, answer and bridge; each a reply, a role and its message."""
    made = encoder(template)
    assert made.decode_raw([[made.end_of_turn]]) == [ENDS[template]]
    ids = made.encode([("user", "go")], MOST)
    for reply, role, message in turns:
        ids += sampled_ids(reply) + ([made.end_of_turn] if ended else [])
        ids += made.bridge([(role, message)], ids[-1], MOST)
    return ids


@pytest.mark.parametrize("template", list(ENDS), ids=["chatml", "headers"])
@given(
    turns=st.lists(
        st.tuples(st.text("abc", min_size=1, max_size=6), st.sampled_from(["user", "tool"]), TEXTS),
        min_size=1,
        max_size=3,
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


def test_a_bridge_closes_a_turn_that_has_another_end() -> None:
    made = encoder(CHATML)
    closed = made.bridge([("user", "cab")], made.end_of_turn, MOST)
    assert made.bridge([("user", "cab")], OTHER, MOST) == [made.end_of_turn, *closed]
    assert made.decode_raw([closed]) == ["\n<|im_start|>user\ncab<|im_end|>\n<|im_start|>assistant\n"]
    assert made.decode_raw([encoder(HEADERS).bridge([("tool", "cab")], encoder(HEADERS).end_of_turn, MOST)]) == [
        "<|start|>ipython<|stop|>\n\ncab<|eot|><|start|>assistant<|stop|>\n\n"
    ]


@pytest.mark.parametrize("absorbs", [False, True])
@pytest.mark.parametrize("template", NAMED.values(), ids=NAMED)
@given(replies=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), message=TEXTS)
@settings(max_examples=30, deadline=None)
def test_a_bridge_has_the_tokens_of_a_whole_transcript_whatever_comes_before(
    template: str, absorbs: bool, replies: list[str], message: str
) -> None:
    made, chat = encoder(template, absorbs=absorbs), [("user", "go")]
    for reply in replies:
        chat += [("assistant", reply), ("tool", message)]
    whole, cut, ended = (
        made.encode(chat, MOST),
        *(made.bridge([("tool", message)], last, MOST) for last in (OTHER, made.end_of_turn)),
    )
    assert whole[-len(cut) :] == cut
    assert cut[1:] == ended


@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8), TEXTS), min_size=1, max_size=3
    )
)
@settings(max_examples=60, deadline=None)
def test_a_bridge_depends_on_the_last_sampled_token_alone(turns: list[tuple[list[int], str]]) -> None:
    made = encoder(CHATML)
    for sampled, message in [*turns, ([7, made.end_of_turn], "a"), ([made.end_of_turn, 7], "a")]:
        (text,) = made.decode_raw([made.bridge([("user", message)], sampled[-1], MOST)])
        closing = "" if sampled[-1] == made.end_of_turn else "<|im_end|>"
        assert text == f"{closing}\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def test_messages_that_are_too_long_are_not_rendered() -> None:
    with pytest.raises(PromptError, match="more than 10 characters"):
        encoder(CHATML).bridge([("user", "a" * 11)], OTHER, 10)


@pytest.mark.parametrize("template", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("absorbs", [False, True])
def test_templates_that_append_are_accepted_for_users_and_tools(template: str, absorbs: bool) -> None:
    for roles in (["user"], ["tool"], ["user", "tool"]):
        encoder(template, absorbs=absorbs).check_append_only("model", roles)


def test_a_template_that_leaves_the_first_space_of_an_answer_to_the_policy_is_accepted() -> None:
    encoder(SPACED).check_append_only("mistral", ["user"])


@pytest.mark.parametrize("template", [THINKER, OPENED[THINKER]], ids=["closed", "opened"])
@pytest.mark.parametrize("roles", [["user"], ["tool", "user"]])
def test_a_template_that_forgets_thoughts_is_refused_with_the_first_token_that_differs(
    template: str, roles: list[str]
) -> None:
    with pytest.raises(ModelError, match=r"^qwen: its chat template rewrites earlier turns") as refused:
        encoder(template).check_append_only("qwen", roles)
    assert "\n" not in str(refused.value)
    thought = r"after turn \d token \d+ is that of 'Answer.*' in place of '<think>"
    assert re.search(thought, str(refused.value))


@pytest.mark.parametrize("template", [THINKER, ALL_THOUGHTS, OPENED[ALL_THOUGHTS]])
def test_thoughts_that_only_a_users_message_removes_stay_between_tools(template: str) -> None:
    made = encoder(template)
    made.check_append_only("qwen", ["tool"])
    assert made.decode_raw([made.bridge([("tool", "cab")], OTHER, MOST)])[0].startswith(
        "<|im_end|>\n<|im_start|>user\ncab<|im_end|>"
    )


@pytest.mark.parametrize("template", [ALL_THOUGHTS, OPENED[ALL_THOUGHTS]])
def test_a_template_that_keeps_all_thoughts_is_accepted(template: str) -> None:
    encoder(template).check_append_only("qwen", ["user"])


def test_a_template_that_says_nothing_of_a_role_is_refused() -> None:
    silent = CHATML.replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{% elif m.role == 'other' %}")
    with pytest.raises(ModelError, match=r"^model: .*leaves out or changes messages of role 'tool'"):
        encoder(silent).check_append_only("model", ["user", "tool"])


def test_a_template_that_changes_an_answer_is_refused() -> None:
    loud = CHATML.replace(
        "{{ m.role }}\n{{ m.content }}", "{{ m.role }}\n{{ m.content | upper if m.role == 'assistant' else m.content }}"
    )
    with pytest.raises(ModelError, match=r"^model: .*does not write an answer as it is"):
        encoder(loud).check_append_only("model", ["user"])
    with pytest.raises(PromptError, match="does not write an answer as it is"):
        encoder(loud).bridge([("user", "a")], OTHER, MOST)


@pytest.mark.parametrize("template", [MANNERED, HEADERS.replace("<|eot|>", "")], ids=["words", "next header"])
def test_a_template_without_an_end_of_turn_is_refused(template: str) -> None:
    with pytest.raises(ModelError, match=r"^model: .*does not close an answer with a special token"):
        encoder(template).check_append_only("model", ["user"])


def test_a_template_that_closes_its_last_answer_alone_is_refused() -> None:
    last = HEADERS.replace("<|eot|>", "{% if loop.last or m.role != 'assistant' %}<|eot|>{% endif %}")
    with pytest.raises(ModelError, match=r"^model: .*closes an answer otherwise when messages follow"):
        encoder(last).check_append_only("model", ["user"])


def test_a_template_that_refuses_the_role_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^model: messages of role 'tool': .*no tools"):
        encoder(NO_TOOLS).check_append_only("model", ["tool"])


def test_the_demos_model_takes_turns_with_users_and_tools(tmp_path: Path) -> None:
    save_tokenizer(make_tokenizer(256), tmp_path)
    made = PromptEncoder(tmp_path)
    made.check_append_only("tiny", ["user", "tool"])
    for role in ("user", "tool"):
        bridge = made.bridge([(role, "higher")], made.end_of_turn, MOST)
        assert made.decode_raw([bridge]) == ["<|user|>higher<|assistant|>"]
        assert len(bridge) == len("higher") + 2
