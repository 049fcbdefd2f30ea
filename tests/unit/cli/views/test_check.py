from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from services.cli.views.check import all_right, print_check


def reference(**changes: Any) -> dict[str, Any]:
    values = {
        "index": 0,
        "data_source": "d",
        "ground_truth": "42",
        "verifier": "gsm8k",
        "accepted": ["alone"],
        "right": True,
    }
    return values | {"detail": "", "response": None} | changes


def check(**changes: Any) -> dict[str, Any]:
    section = {
        "tasks": 10, "counted": 10, "shortest": 4, "median": 5, "longest": 9, "room": 8, "too_long": 0, "filtered": False,
        "refused": 0, "refusal": "",
        "prompts": [{"index": 0, "text": "<|im_start|>user\n[bold]6 · 7[/bold]", "tokens": 4}], "references": [reference()],
    }  # fmt: skip
    return {"unchecked": [], "notes": [], "sections": {"train": section | changes}}


def printed(found: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=200)
    print_check(console, found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_prompt_is_shown_as_it_is_with_its_special_tokens() -> None:
    text = printed(check())
    assert "  │ <|im_start|>user\n  │ [bold]6 · 7[/bold]\n" in text
    assert "10 tasks; prompts have 4 to 9 tokens (median 5), and the context has room for 8" in text
    assert "task 0: gsm8k judges '42' right: alone" in text
    assert text.endswith("the job would be accepted\n")


def test_what_is_wrong_or_was_not_tried_is_said() -> None:
    found = check(too_long=3, refused=1, refusal="begin with the user", counted=7)
    text = printed(found | {"notes": ["references were not judged: no server"], "unchecked": ["data.train.source"]})
    assert "prompts of the first 7 have" in text
    assert "3 prompts have more tokens than there is room for" in text
    assert "refused: 1 prompts: begin with the user" in text
    assert "data.train.source could not be checked in time" in text
    assert "references were not judged: no server" in text
    assert "accepted" not in text


def test_a_reference_that_is_wrong_fails_the_check_unless_the_own_response_is_right() -> None:
    response = {"status": "scored", "reward": 1.0, "accuracy": 1.0, "detail": "right"}
    wrong = reference(right=False, accepted=[], detail="no answer found")
    assert not all_right(check(references=[wrong]))
    assert "in no usual form right: no answer found" in printed(check(references=[wrong]))
    assert all_right(check(references=[wrong | {"response": response}]))
    assert "your response: scored, reward 1, accuracy 1: right" in printed(
        check(references=[wrong | {"response": response}])
    )
    assert all_right(check(references=[reference(right=None, accepted=[])]))
