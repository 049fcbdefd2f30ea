from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.common.spec.job import dump_spec, parse_recorded_spec, parse_spec

SMALL = "model: {path: tiny}\ndata: {train: {source: reasoning_gym:chain_sum}}\n"


def test_tensorboard_alone_is_on_also_in_specs_of_earlier_releases() -> None:
    for spec in (parse_spec(SMALL), parse_recorded_spec(SMALL)):
        assert spec.trackers.model_dump() == {
            "tensorboard": True, "mlflow": False, "wandb": False, "swanlab": False, "project": "millrace", "run_name": None, "tags": [],
            "samples_interval_steps": 10,
        }  # fmt: skip


def test_a_resolved_spec_keeps_its_trackers() -> None:
    spec = parse_spec(f"{SMALL}trackers: {{mlflow: true, tags: [baseline, lr 1e-6], run_name: first}}")
    assert parse_recorded_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("api_key: secret", "trackers.api_key"),
        ("tags: ['https://example.invalid/']", "trackers.tags.0"),
        ("project: ''", "trackers.project"),
        ("wandb: 'yes'", "trackers.wandb"),
    ],
)
def test_what_is_no_setting_is_refused_at_its_field(given: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        parse_spec(f"{SMALL}trackers: {{{given}}}")
