"""Configurations as dotted keys, and the references between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.imports.inputs.keys import flat, read_yaml, resolve
from services.cli.imports.settings import OpenText
from services.common.errors import ConfigError


def test_every_leaf_has_a_key_in_the_order_of_the_file() -> None:
    document = {"b": {"x": 1, "y": {}}, "a": [1, {"z": 2}], "c": None}
    assert list(flat(document)) == [("b.x", 1), ("b.y", {}), ("a", [1, {"z": 2}]), ("c", None)]


def test_an_exponent_without_a_point_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("lr: 1e-6\nstyle: 'no'\n")
    assert read_yaml(file) == {"lr": 1e-6, "style": "no"}


@pytest.mark.parametrize("text", ["- 1", "a: [", "a: *b", "a: !!python/name:os.system", "a: 1\na: 2"])
def test_a_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml: "):
        read_yaml(file)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${a.b}", 5),
        ("${.c}", "near"),
        ("${oc.select:a.b,7}", 5),
        ("${oc.select:a.x,7}", "7"),
        ("${oc.env:NAME,none}", "set"),
        ("${oc.env:OTHER,none}", "none"),
        ("dir/${a.b}/x", "dir/5/x"),
        ("${d.default}", "by default"),
        ("plain", "plain"),
    ],
)
def test_a_reference_has_the_value_that_it_names(value: str, expected: object) -> None:
    given = {"a.b": 5, "k.c": "near", "k.v": value}
    assert resolve(given, {"d.default": "by default"}, {"NAME": "set"})["k.v"] == expected


@pytest.mark.parametrize("value", ["${a.none}", "x${oc.env:NONE}", "${k.v}", "${now:%Y}"])
def test_a_reference_that_leads_nowhere_is_open(value: str) -> None:
    assert isinstance(resolve({"k.v": value}, {}, {})["k.v"], OpenText)
