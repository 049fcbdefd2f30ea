"""Handlers: rows in the datasets' own shapes become the standard columns."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

import pytest

from services.cli.prepare.handlers import ALIASES, BUILT_IN, BuiltIn, find_handler
from services.cli.prepare.prompt_types import PROMPT_TYPES, prompt_type
from services.common.config import plugins
from services.common.config.verifiers import built_in_choice
from services.common.data.rows import read_row
from services.common.errors import ConfigError, DataError
from services.reward.verifiers.dapo_math import verify

DAPO: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [
        {"role": "user", "content": "Solve it. The last line is of the form Answer: $Answer.\n\nWhat is 6 × 7?"}
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
GSM8K = {"question": "How many clips?", "answer": "She sold 1,000 + 80 = <<1000+80=1080>>1080.\n#### 1,080"}
MATH = {
    "problem": "What is $\\frac12 + 1$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is $\\frac12 + \\frac22 = \\boxed{\\frac{3}{2}}$.",
}
HELLASWAG = {
    "ind": 4,
    "activity_label": "Removing ice from car",
    "ctx": "A man writes over the snow. Then",
    "endings": ["he sings.", "he sleeps.", "he scrapes the ice.", "he swims."],
    "label": "2",
}
HH_TRANSCRIPTS = {
    "chosen": "\n\nHuman: Hello?\n\nAssistant: Hi.\n\nHuman: What is 2?\n\nAssistant: A number.",
    "rejected": "\n\nHuman: Hello?\n\nAssistant: Hi.\n\nHuman: What is 2?\n\nAssistant: No idea.",
}
HH_PROMPT = {
    "prompt": "\n\nHuman: Hello?\n\nAssistant: Hi.\n\nHuman: What is 2?\n\nAssistant:",
    "response": " A number.",
    "chosen": " A number.",
    "rejected": " No idea.",
}
HH_TALK = [("user", "Hello?"), ("assistant", "Hi."), ("user", "What is 2?")]
ALPACA = {
    "instruction": "Translate.",
    "input": "Guten Tag",
    "output": "Good day",
    "system": "Be brief.",
    "history": [["Hi", "Hello"]],
}
DEEPSCALER = {"problem": "1 + 1?", "answer": "2", "solution": "…"}
ORCA = {"system": "Be brief.", "question": "Name a colour.", "chosen": "Red.", "rejected": "Dog."}
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Red."}]}
SHARE_GPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "A colour?"},
        {"from": "gpt", "value": "Red."},
    ]
}

Read = tuple[list[tuple[str, str]], str, str]


def read(name: str, row: dict[str, Any], columns: dict[str, str] | None = None) -> Read:
    made = find_handler(name)(row, columns or {})
    record = read_row(made, data_source=None)
    return [(message.role, message.content) for message in record.prompt], record.ground_truth, record.data_source


@pytest.mark.parametrize(
    ("name", "row", "columns", "expected"),
    [
        ("dapo_math_17k", DAPO, {}, ([("user", DAPO["prompt"][0]["content"])], "42", "math_dapo")),
        ("gsm8k", GSM8K, {}, ([("user", "How many clips?")], "1080", "openai/gsm8k")),
        ("math", MATH, {}, ([("user", MATH["problem"])], "\\frac{3}{2}", "hendrycks_math")),
        ("math", {"problem": "p", "answer": "\\pi"}, {"response": "answer"}, ([("user", "p")], "\\pi", "hendrycks_math")),
        ("full_hh_rlhf", HH_TRANSCRIPTS, {}, (HH_TALK, "A number.", "full_hh_rlhf")),
        ("full_hh_rlhf", HH_PROMPT, {}, (HH_TALK, "A number.", "full_hh_rlhf")),
        (
            "alpaca", ALPACA, {},
            ([("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Translate.\nGuten Tag")], "Good day", "alpaca"),
        ),
        ("chat", CHAT, {}, ([("user", "Name a colour.")], "Red.", "chat")),
        ("chat", SHARE_GPT, {}, ([("system", "Be brief."), ("user", "A colour?")], "Red.", "chat")),
        ("chat", {"prompt": "A colour?", "ground_truth": "Red."}, {}, ([("user", "A colour?")], "Red.", "chat")),
        (
            "R1AlpacaStyleInstructionHandler", DEEPSCALER, {"prompt": "problem", "query": "", "response": "answer", "system": ""},
            ([("user", "1 + 1?")], "2", "alpaca"),
        ),
        (
            "Math17kAlpacaStyleInstructionHandler", DAPO, {"prompt": "prompt", "query": "", "response": "reward_model", "system": ""},
            ([("user", DAPO["prompt"][0]["content"])], "42", "math_dapo"),
        ),
        (
            "AlpacaStylePairwiseHandler", ORCA, {"prompt": "question", "query": "", "system": "system"},
            ([("system", "Be brief."), ("user", "Name a colour.")], "Red.", "pairs"),
        ),
    ],
)  # fmt: skip
def test_a_row_of_each_dataset_is_read(name: str, row: dict[str, Any], columns: dict[str, str], expected: Read) -> None:
    assert read(name, row, columns) == expected


def test_every_built_in_handler_is_tested_above() -> None:
    assert set(BUILT_IN) == set(BuiltIn)
    assert set(ALIASES.values()) <= set(BuiltIn)


def test_an_ending_is_chosen_by_a_letter_that_a_verifier_finds() -> None:
    [(_, prompt)], truth, source = read("hellaswag", HELLASWAG)
    assert (truth, source) == ("C", "hellaswag")
    assert "A man writes over the snow. Then" in prompt
    assert "C. he scrapes the ice." in prompt
    assert verify("It is C.\nAnswer: C", truth, {}).reward > verify("Answer: A", truth, {}).reward


@pytest.mark.parametrize(("name", "expected"), [("dapo_math_17k", "dapo_math"), ("gsm8k", "gsm8k"), ("math", "math")])
def test_what_can_be_checked_has_its_verifier_without_a_setting(name: str, expected: str) -> None:
    assert built_in_choice(BUILT_IN[name].data_source) == expected


def test_the_worse_answer_of_a_pair_is_kept() -> None:
    for name, row in (("full_hh_rlhf", HH_TRANSCRIPTS), ("pairs", ORCA | {"instruction": "x"})):
        made = find_handler(name)(row, {})
        assert made["extra_info"] == {"rejected": row["rejected"].rpartition("Assistant:")[2].strip()}
        assert made["reward_model"]["style"] == "model"


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "42"}, "does not end in `#### <number>`"),
        ("gsm8k", {"answer": "#### 1"}, "the column of `prompt` is missing"),
        ("math", {"problem": "p", "solution": "First.\nThen."}, "no .boxed"),
        ("hellaswag", HELLASWAG | {"label": ""}, "the label '' is not the number of an ending"),
        ("hellaswag", HELLASWAG | {"label": "4"}, "the label '4'"),
        ("hellaswag", HELLASWAG | {"endings": "a"}, "no list of texts"),
        ("full_hh_rlhf", {"chosen": "What?", "rejected": "Why?"}, "no `Human:` turn"),
        ("chat", {"messages": [{"role": "wizard", "content": "x"}]}, "message 0 has the role 'wizard'"),
        ("chat", {"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
        ("chat", {}, "no text and no list of messages"),
        ("alpaca", {"instruction": " ", "output": "x"}, "`prompt` is empty"),
    ],
)
def test_a_row_that_is_not_what_it_should_be_is_refused_with_the_reason(
    name: str, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        read(name, row)


def shout(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    return {
        "prompt": str(row[columns.get("prompt", "text")]).upper(),
        "data_source": "own",
        "reward_model": {"ground_truth": "1"},
    }


def test_an_installed_handler_is_found_by_its_name_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "shout": EntryPoint("shout", f"{__name__}:shout", plugins.DATA_HANDLERS),
        "broken": EntryPoint("broken", "no_such_package:read", plugins.DATA_HANDLERS),
    }
    monkeypatch.setattr(
        EntryPoint, "load", lambda point: shout if point.name == "shout" else __import__("no_such_package")
    )
    monkeypatch.setattr(plugins, "offered", lambda _: MappingProxyType(points))
    assert read("shout", {"text": "hello"}) == ([("user", "HELLO")], "1", "own")
    with pytest.raises(ConfigError, match=r"^handler_name: 'broken' cannot be imported: No module named"):
        find_handler("broken")
    with pytest.raises(ConfigError, match=r"^handler_name: there is no handler 'gsm9k'; did you mean gsm8k\?.*shout"):
        find_handler("gsm9k")


def test_prompt_types_are_instructions_around_a_prompt() -> None:
    assert prompt_type("empty") == ("", "{prompt}")
    assert prompt_type("qwen_math_r1").system.endswith("\\boxed{}.")
    assert all("{prompt}" in found.template for found in PROMPT_TYPES.values())
    with pytest.raises(ConfigError, match=r"^prompt_type: there is no prompt type 'qwen_r2'; did you mean qwen_r1"):
        prompt_type("qwen_r2")
