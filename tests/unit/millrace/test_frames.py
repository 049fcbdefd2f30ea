"""DataFrames of what jobs have measured."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from millrace.frames import MissingPackageError, comparison_frame, rollout_frame, step_frame


def test_a_step_is_a_row_by_its_number_and_an_object_in_it_several_columns() -> None:
    frame = step_frame([{"step": 1, "reward": None, "groups": {"trained": 4}}, {"step": 2, "reward": 0.5, "kl": 0.1}])
    assert frame.index.name == "step"
    assert frame.loc[2, "reward"] == 0.5
    assert frame["reward"].isna().tolist() == [True, False]
    assert frame.loc[1, "groups.trained"] == 4


def test_no_steps_are_a_frame_without_rows_by_step() -> None:
    assert (len(step_frame([])), step_frame([]).index.name) == (0, "step")


def test_each_rollout_is_a_row_with_its_group() -> None:
    rollouts = [{"text": "5", "reward": 1.0}, {"text": "6", "reward": 0.0}]
    groups: list[dict[str, Any]] = [
        {"group_id": 7, "prompt": "2 + 3 =", "rollouts": rollouts},
        {"group_id": 6, "rollouts": []},
    ]
    frame = rollout_frame(groups)
    assert frame["group_id"].tolist() == [7, 7]
    assert frame["text"].tolist() == ["5", "6"]
    assert list(frame.columns) == ["group_id", "prompt", "text", "reward"]
    assert len(rollout_frame([])) == 0


def test_an_episode_has_a_list_of_turns_and_beside_it_a_completion_an_empty_one() -> None:
    turns = [{"turn": 1, "text": "calc:2*3"}, {"turn": 2, "text": "6"}]
    rollouts = [{"text": "calc:2*3 6", "turns": turns}, {"text": "6"}]
    frame = rollout_frame([{"group_id": 7, "environment": "calculator", "rollouts": rollouts}])
    assert frame["turns"].tolist() == [turns, []]
    assert frame.explode("turns")["turns"].str["text"].tolist()[:2] == ["calc:2*3", "6"]


def test_a_comparison_has_a_row_for_each_job_and_a_column_for_each_setting_that_differs() -> None:
    run = {"state": "running", "step": 1, "steps": 2, "reward": None, "best_eval": None}
    good = {
        "reward": 0.5,
        "best_eval": {"avg_at_k": 0.7, "avg_at_k_se": 0.1, "step": 1},
    }
    differences = [
        {"path": "learner.lr", "values": [1e-6, 3e-6]},
        {"path": "reward.verifiers", "values": [None, {"*": "math"}]},
    ]
    frame = comparison_frame({"runs": [run | {"id": "a"}, run | good | {"id": "b"}], "differences": differences})
    assert frame.index.tolist() == ["a", "b"]
    assert frame["learner.lr"].tolist() == [1e-6, 3e-6]
    assert frame.loc["b", "reward.verifiers"] == {"*": "math"}
    assert frame.loc["b", ["reward", "best_avg_at_k", "best_step"]].tolist() == [0.5, 0.7, 1]
    assert frame["reward"].isna().tolist() == [True, False]


def test_without_pandas_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match=r'pip install "millrace\[notebook\]"'):
        step_frame([{"step": 1}])
