"""Documents of jobs to submit. Files themselves: tests/unit/cli/test_overrides.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.document import make_document, set_value, sweep
from services.common.errors import ConfigError

SPEC: dict[str, Any] = {"name": "demo", "learner": {"lr": 1e-6}, "tags": ["first"]}


def test_a_mapping_and_its_file_give_the_same_document(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: demo\nlearner: {lr: 1e-6}\ntags: [first]")
    changes: dict[str, Any] = {"learner.steps": 5, "reward.verifiers": {"*": "math"}}
    expected = {
        "name": "demo", "learner": {"lr": 1e-6, "steps": 5}, "tags": ["first", "second"], "reward": {"verifiers": {"*": "math"}},
    }  # fmt: skip
    for spec in (SPEC, tmp_path / "job.yaml", str(tmp_path / "job.yaml")):
        assert make_document(spec, changes, ["second"]) == expected


def test_what_was_given_stays_as_it_is() -> None:
    given = {"learner": {"lr": 1e-6}}
    values = {"reward.verifiers": {"*": "math"}}
    made = make_document(given, values | {"learner.lr": 1.0})
    made["reward"]["verifiers"]["*"] = "gsm8k"
    assert (given, values) == ({"learner": {"lr": 1e-6}}, {"reward.verifiers": {"*": "math"}})


def test_a_sweep_is_each_combination_under_one_tag_more() -> None:
    made = sweep(SPEC, {"learner.lr": [1e-6, 3e-6], "rollout.group_size": (4, 8)})
    assert [(job["learner"]["lr"], job["rollout"]["group_size"]) for job in made] == [
        (1e-6, 4), (1e-6, 8), (3e-6, 4), (3e-6, 8),
    ]  # fmt: skip
    ((first, family),) = {tuple(job["tags"]) for job in made}
    assert (first, family.startswith("sweep:demo-")) == ("first", True)
    assert SPEC["tags"] == ["first"]


@pytest.mark.parametrize("values", [[], "1e-6", 1e-6])
def test_a_sweep_over_what_is_no_list_of_values_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"learner\.lr: a sweep needs a list"):
        sweep(SPEC, {"learner.lr": values})


@pytest.mark.parametrize(
    ("path", "message"),
    [("learner.lr.x", r"learner\.lr is not a section"), ("learner..lr", "no dotted path"), ("", "no dotted path")],
)
def test_a_path_that_cannot_be_set_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_value({"learner": {"lr": 1}}, path, 2)


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_value_that_json_cannot_carry_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="the job: has a value that JSON cannot carry"):
        make_document(SPEC, {"learner.lr": value})
