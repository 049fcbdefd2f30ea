"""Jobs of the comparison with peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learner import SHAPES as LEARNER_SHAPES
from benchmarks.peers.shapes import SHAPES, WAYS, job_of
from services.common.errors import ConfigError
from services.common.spec.job import JobSpec

MODEL = Path("/models/one")
DATA = Path("/data/train.jsonl")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_valid_job_in_every_way(name: str, way: str) -> None:
    shape = SHAPES[name]
    spec = JobSpec.model_validate(job_of(shape.spec, MODEL, DATA if shape.needs_data else None, WAYS[way]))
    assert spec.model.path == str(MODEL)
    assert (spec.data.train.source == str(DATA)) is shape.needs_data
    assert spec.off_policy.max_off_policy_steps == (0 if "sync" in way.split() else 2)
    assert spec.algorithm.filter_groups_enable is ("unfiltered" not in way)
    assert not spec.eval.enabled


@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_of_the_peer_divides_the_step(name: str) -> None:
    shape = SHAPES[name]
    spec = JobSpec.model_validate(job_of(shape.spec, MODEL, DATA if shape.needs_data else None))
    assert spec.algorithm.groups_per_step * spec.rollout.group_size % shape.micro_batch == 0
    assert shape.limits in LEARNER_SHAPES
    assert set(shape.ways) <= WAYS.keys()


def test_later_changes_win_and_wrong_ones_are_refused() -> None:
    document = job_of(SHAPES["demo"].spec, MODEL, None, ("learner.lr=0.5", "learner.lr=0.25"))
    assert document["learner"]["lr"] == 0.25
    with pytest.raises(ConfigError, match=r"learner\.lr"):
        job_of(SHAPES["demo"].spec, MODEL, None, ("learner.lr=-1",))
