"""docs/algorithms.md says what the code does: every preset with its fields, every choice, and every field of its sections."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest

from services.common.spec import choices
from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.base import Section
from services.common.spec.choices import Preset
from services.common.spec.job import parse_spec
from services.common.spec.learner import CriticSpec, LrSchedule, OptimizerFields, ReferenceSpec
from services.common.spec.presets import DIVIDE_BY_LONGEST, PRESETS

DOCUMENT = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
CHOICES: list[type[StrEnum]] = [
    *(item for item in vars(choices).values() if isinstance(item, type) and issubclass(item, StrEnum) and item is not StrEnum),
    LrSchedule,
]  # fmt: skip
BLOCKS = re.findall(r"^```\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def row(preset: Preset) -> list[str]:
    """Cells of a preset's row."""
    [line] = re.findall(rf"^\| `{preset}` \| arXiv .*$", DOCUMENT, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("preset", list(Preset))
def test_a_presets_row_names_every_field_in_which_it_differs(preset: Preset) -> None:
    defaults = AlgorithmSpec()
    wanted = {
        f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
        for name, value in PRESETS[preset].items()
        if value != getattr(defaults, name)
    }
    named = {text for text in re.findall(r"`([^`]+)`", row(preset)[3]) if ": " in text}
    assert named == wanted
    assert ("constant_length" in row(preset)[3]) is (preset in DIVIDE_BY_LONGEST)


@pytest.mark.parametrize("preset", list(Preset))
def test_a_presets_row_names_the_roles_that_it_needs(preset: Preset) -> None:
    roles = re.findall(r"`(\w+)`", row(preset)[4])
    sections = "".join(f"{role}: {{}}\n" for role in roles)
    job = f"model: {{path: tiny}}\ndata: {{train: {{source: a.jsonl}}}}\nalgorithm: {{preset: {preset}}}\n"
    spec = parse_spec(job + sections)
    assert (spec.reference is not None) is spec.algorithm.wants_reference
    assert (spec.critic is not None) is (spec.algorithm.advantage_estimator == "gae")


@pytest.mark.parametrize("kind", CHOICES, ids=lambda kind: kind.__name__)
def test_every_choice_is_explained(kind: type[StrEnum]) -> None:
    for choice in kind:
        assert re.search(rf"`(\w+: )?{choice}`", DOCUMENT), choice


@pytest.mark.parametrize("section", [AlgorithmSpec, CriticSpec, ReferenceSpec], ids=lambda section: section.__name__)
def test_every_field_is_explained(section: type[Section]) -> None:
    for name in section.model_fields.keys() - OptimizerFields.model_fields.keys():
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", DOCUMENT), name


def test_the_example_of_a_job_is_one() -> None:
    [example] = [block for block in BLOCKS if "preset: ppo" in block]
    spec = parse_spec(f"model: {{path: tiny}}\ndata: {{train: {{source: a.jsonl}}}}\n{example}")
    assert (spec.learner.mini_batch_size, spec.learner.ppo_epochs) == (16, 2)
