"""Unknown keys: every answer leads to a setting that exists."""

from __future__ import annotations

import pytest

from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec
from services.common.spec.unknown_keys import MISSING, RENAMED, explain


@pytest.mark.parametrize(("name", "field"), RENAMED.items())
def test_a_name_of_trl_or_verl_leads_to_a_setting_that_exists_and_is_none_itself(name: str, field: str) -> None:
    section: type = JobSpec
    for key in field.split("."):
        assert key in section.model_fields, field  # type: ignore[attr-defined]
        kinds = (section.model_fields[key].annotation, *getattr(section.model_fields[key].annotation, "__args__", ()))  # type: ignore[attr-defined]
        section = next((kind for kind in kinds if hasattr(kind, "model_fields")), object)
    assert explain(JobSpec, [name]).endswith(f"is {field} here")


@pytest.mark.parametrize(("name", "reason"), MISSING.items())
def test_a_name_without_a_counterpart_is_answered_with_the_reason(name: str, reason: str) -> None:
    assert explain(JobSpec, ["learner", name]) == f"is not a setting: {reason}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (["lerner"], "is not a setting; did you mean learner, reward?"),
        (["steps"], "is not a setting here; it is learner.steps"),
        (["rollout", "lr"], "is not a setting here; it is critic.lr or learner.lr"),
        (["critic", "pth"], "is not a setting; did you mean path?"),
        (["reward", "judges", "mine", "endpont"], "is not a setting; did you mean endpoint?"),
        (["nowhere", "at", "all"], "is not a setting"),
    ],
)
def test_a_misspelt_key_is_answered_with_its_section_or_a_near_name(path: list[str], message: str) -> None:
    assert explain(JobSpec, path) == message


def test_a_part_of_a_spec_knows_only_its_own_names() -> None:
    assert explain(DataSourceSpec, ["learning_rate"]) == "is not a setting"
