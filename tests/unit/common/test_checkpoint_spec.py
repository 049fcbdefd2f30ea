"""How to load is said together with what to load."""

from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.common.spec.job import parse_spec

SPEC = "model: {path: tiny}\ndata: {train: {source: sums.jsonl}}\ncheckpoint: {%s}\n"


@pytest.mark.parametrize("name", ["finetune", "no_load_optim", "no_load_rng"])
def test_a_way_to_load_without_something_to_load_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint: .*{name} says how to load: set checkpoint.load too"):
        parse_spec(SPEC % f"{name}: true")
    spec = parse_spec(SPEC % f"{name}: true, load: demo-1")
    assert spec.checkpoint.load == "demo-1"
    assert getattr(spec.checkpoint, name)


def test_an_empty_place_to_load_from_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.load: String should have at least 1 character"):
        parse_spec(SPEC % "load: ''")
