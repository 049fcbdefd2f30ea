"""Procedural sources: reproducible, disjoint by seed, cheap, and with errors that help."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import reasoning_gym

from services.common.config.settings import Settings
from services.common.data.record import TaskSource, jsonable
from services.common.data.source import open_source
from services.common.data.trial import TRIED_TASKS, check_source
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec


def opened(task: str = "chain_sum", field: str = "data.train", **spec: Any) -> TaskSource:
    return open_source(DataSourceSpec(source=f"reasoning_gym:{task}", **spec), Settings(), field=field)


def test_a_record_has_what_its_verifier_needs() -> None:
    record = opened(config={"min_terms": 2, "max_terms": 2}, size=50, seed=3)[7]
    extra = record.extra_info
    assert record.data_source == "reasoning_gym:chain_sum"
    assert extra["task"] == "chain_sum"
    assert record.prompt[0].content == extra["entry"]["question"]
    assert record.ground_truth == extra["entry"]["answer"]
    again = reasoning_gym.create_dataset(extra["task"], **extra["config"])
    assert jsonable(again[extra["index"]]) == extra["entry"]
    assert again.score_answer(record.ground_truth, extra["entry"]) == 1.0
    assert json.loads(json.dumps(extra)) == extra


def test_tasks_are_asked_for_in_any_order() -> None:
    forward, backward = opened(size=20), opened(size=20)
    assert [forward[i] for i in range(20)] == [backward[i] for i in reversed(range(20))][::-1]


def test_sources_with_neighbouring_seeds_share_next_to_nothing() -> None:
    config = {"min_terms": 4, "max_terms": 6}
    train = {opened(seed=0, size=300, config=config)[i].prompt for i in range(300)}
    held_out = {opened(seed=1, size=300, config=config)[i].prompt for i in range(300)}
    assert len(train & held_out) <= 3


def test_the_default_size_is_ten_thousand() -> None:
    assert len(opened()) == 10_000


def test_a_task_without_a_single_answer_has_an_empty_ground_truth() -> None:
    assert opened("graph_color", size=1)[0].ground_truth == ""


def test_prompting_is_applied() -> None:
    record = opened(size=1, system_prompt="s", prompt_template="{prompt}!", data_source="mine")[0]
    assert [message.role for message in record.prompt] == ["system", "user"]
    assert record.prompt[1].content.endswith("!")
    assert record.data_source == "mine"


def test_the_fingerprint_follows_the_settings() -> None:
    assert opened(seed=1).fingerprint == opened(seed=1).fingerprint
    assert opened(seed=1).fingerprint != opened(seed=2).fingerprint
    assert opened(config={"max_terms": 5}).fingerprint != opened().fingerprint


def test_beyond_the_size_there_is_no_task() -> None:
    source = opened(size=2)
    for index in (2, -1):
        with pytest.raises(IndexError):
            source[index]


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        ("chain_sun", {}, r"^data\.eval\.source: .*no task 'chain_sun'; did you mean chain_sum"),
        ("", {}, r"^data\.eval\.source: .*no task ''"),
        (
            "chain_sum",
            {"max_term": 3},
            r"^data\.eval\.config: chain_sum has no setting 'max_term'; did you mean max_terms",
        ),
        ("chain_sum", {"seed": 3}, r"^data\.eval\.config: 'seed' is set by data\.eval\.seed"),
        ("chain_sum", {"size": 3}, r"^data\.eval\.config: 'size' is set by data\.eval\.size"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, r"^data\.eval\.config: .*max_terms must be >= min_terms"),
        ("chain_sum", {"min_terms": "two"}, r"^data\.eval\.config: chain_sum refuses"),
        ("composite", {"datasets": [{"name": "chain_sum"}]}, r"^data\.eval\.config: composite refuses"),
    ],
)
def test_a_wrong_setting_is_named(task: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(task, field="data.eval", config=config)


@pytest.mark.parametrize(
    ("task", "config", "words"),
    [
        ("maze", {"min_dist": 100_000}, "maze refuses"),
        (
            "prime_factorization",
            {"min_value": 10**30 + 57, "max_value": 10**30 + 57},
            "an integer of more than 64 bits",
        ),
        ("chain_sum", {"min_terms": -(2**63) - 1}, "an integer of more than 64 bits"),
        ("chain_sum", {"min_terms": "x" * 1025}, "a text of 1025 characters"),
        ("chain_sum", {"min_terms": [1] * 1001}, "more values than the 1000"),
        ("chain_sum", {"min_terms": {str(number): 1 for number in range(600)}}, "more values than the 1000"),
        ("chain_sum", {"min_terms": [[[[[[[[1]]]]]]]]}, "nested more than 8 deep"),
        ("chain_sum", {"min_terms": {"x" * 2000: 1}}, "a text of 2000 characters"),
        ("chain_sum", {"min_digits": 300_000, "max_digits": 300_000, "min_terms": 2, "max_terms": 2}, ""),
        ("chain_sum", {"min_terms": 90_000, "max_terms": 90_000}, "the prompt has"),
    ],
)
def test_settings_that_make_a_generator_fail_or_tasks_too_large_are_named(
    task: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=r"^data\.train\.config: ") as caught:
        opened(task, config=config)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RecursionError("deep"), RuntimeError("a\nb"), OSError(28, "full"), KeyError("x"), StopIteration()],
)
@pytest.mark.parametrize("late", [False, True])
def test_whatever_a_generator_raises_is_about_its_settings(
    monkeypatch: pytest.MonkeyPatch, error: Exception, late: bool
) -> None:
    class Failing:
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index >= late:
                raise error
            return {"question": "q", "answer": "a"}

    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda *_, **__: Failing())
    with pytest.raises(DataError, match=r"^data\.train\.config: chain_sum refuses \{\}: ") as caught:
        opened()[5]
    assert "\n" not in str(caught.value)


def test_a_trial_makes_tasks_all_over_the_source() -> None:
    facts = check_source(
        {"source": "reasoning_gym:chain_sum", "size": 100}, [], {}, "data.train", time.monotonic() + 60
    )
    assert facts == {
        "fingerprint": opened(size=100).fingerprint,
        "tasks": 100,
        "checked": TRIED_TASKS,
        "all_checked": False,
        "data_sources": ["reasoning_gym:chain_sum"],
    }
    facts = check_source({"source": "reasoning_gym:chain_sum", "size": 3}, [], {}, "data.train", 0.0)
    assert facts["checked"] == 1
