"""Filter of samples: which groups and rollouts it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.streams.types import Purpose
from services.gateway.samples import SampleFilter

RIGHT = {"text": "It is 42", "reward": 1.0, "accuracy": 1.0, "finish_reason": "stop"}
WRONG = {"text": "it is 41", "reward": -1.0, "accuracy": 0.0, "finish_reason": "stop"}
CUT = {"text": "Let me think", "reward": 0.0, "accuracy": 0.0, "finish_reason": "length"}
BROKEN = {"text": "42", "reward": None, "accuracy": None, "finish_reason": "stop"}
EPISODE = {
    "text": "calc:2*3 […9 characters…]", "reward": 1.0, "accuracy": 1.0, "finish_reason": "stop", "turns": [
        {"turn": 1, "said": [{"role": "user", "content": "2*3?"}], "text": "calc:2*3"},
        {"turn": 2, "said": [{"role": "tool", "content": "Six"}], "text": "the answer: 6"},
    ],
}  # fmt: skip
CROWDED = {"text": "calc:", "reward": 0.0, "accuracy": 0.0, "finish_reason": "context", "turns": []}
SAMPLES: list[dict[str, Any]] = [
    {"group_id": 7, "purpose": "eval", "rollouts": [RIGHT, RIGHT]},
    {"group_id": 5, "purpose": "train", "rollouts": [RIGHT, WRONG, CUT]},
    {"group_id": 0, "purpose": "train", "rollouts": [BROKEN, CUT]},
    {"group_id": 3, "purpose": "train", "rollouts": []},
    {"group_id": 9, "purpose": "train", "rollouts": [EPISODE, CROWDED]},
]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (SampleFilter(), {7: [RIGHT, RIGHT], 5: [RIGHT, WRONG, CUT], 0: [BROKEN, CUT], 3: [], 9: [EPISODE, CROWDED]}),
        (SampleFilter(purpose=Purpose.EVAL), {7: [RIGHT, RIGHT]}),
        (SampleFilter(group=0), {0: [BROKEN, CUT]}),
        (SampleFilter(group=99), {}),
        (SampleFilter(wrong=True), {5: [WRONG, CUT], 0: [CUT], 9: [CROWDED]}),
        (SampleFilter(failed=True), {0: [BROKEN]}),
        (SampleFilter(truncated=True), {5: [CUT], 0: [CUT], 9: [CROWDED]}),
        (SampleFilter(grep="six"), {9: [EPISODE]}),
        (SampleFilter(grep="ANSWER: 6"), {9: [EPISODE]}),
        (SampleFilter(grep="2*3?"), {}),
        (SampleFilter(grep="IT IS"), {7: [RIGHT, RIGHT], 5: [RIGHT, WRONG]}),
        (SampleFilter(wrong=True, grep="it is"), {5: [WRONG]}),
        (SampleFilter(purpose=Purpose.EVAL, wrong=True), {}),
    ],
    ids=repr,
)
def test_a_filter_leaves_the_groups_that_have_such_rollouts_with_those_only(
    wanted: SampleFilter, left: dict[int, list[dict[str, Any]]]
) -> None:
    assert {sample["group_id"]: sample["rollouts"] for sample in wanted.select(SAMPLES)} == left


def test_nothing_is_changed_in_the_samples_themselves() -> None:
    before = repr(SAMPLES)
    list(SampleFilter(wrong=True).select(SAMPLES))
    assert repr(SAMPLES) == before
