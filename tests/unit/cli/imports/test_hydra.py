"""Hydra's overrides."""

from __future__ import annotations

import pytest

from services.cli.imports.inputs.hydra import apply, is_override
from services.common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", 1),
        ("a.b=1e-6", 1e-6),
        ("a.b=0.", 0.0),
        ("a.b=-1", -1),
        ("a.b=True", True),
        ("a.b=false", False),
        ("a.b=null", None),
        ("a.b=", ""),
        ("a.b='1'", "1"),
        ('a.b="it\\"s"', 'it"s'),
        ("a.b=token-mean", "token-mean"),
        ("a.b=/data/x=y.parquet", "/data/x=y.parquet"),
        ("a.b=['x, y', z, 1]", ["x, y", "z", 1]),
        ("a.b=[]", []),
        ("a.b=[[1, 2], [3]]", [[1, 2], [3]]),
        ("a.b={}", {}),
        ("a.b=${oc.select:c,d}", "${oc.select:c,d}"),
        ("+a.b=1", 1),
        ("++a.b=1", 1),
    ],
)
def test_a_value_is_typed_as_hydra_types_it(text: str, expected: object) -> None:
    (value,) = apply([text], {}).values()
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["a.b", "=1", "a b=1", "a.b=1,2", "a.b=[1", "a.b={x}", "a.b='x", "a.b='x'y", "+a.b"])
def test_a_bad_override_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply([text], {})
    assert repr(text) in str(caught.value)


def test_the_last_override_of_a_key_wins() -> None:
    assert apply(["a.b=1", "++a.b=2"], {"a.b": 0, "a.c": 3}) == {"a.b": 2, "a.c": 3}


def test_a_mapping_sets_its_keys_and_keeps_the_others() -> None:
    assert apply(["a={b: 1, c: {d: x}}"], {"a.b": 0, "a.e": 5}) == {"a.b": 1, "a.e": 5, "a.c.d": "x"}


def test_a_deleted_key_is_gone_and_leaves_a_trace() -> None:
    assert apply(["~a.b"], {"a.b": 1, "a.c": 2}) == {"a.c": 2, "~a.b": None}


def test_a_file_is_no_override() -> None:
    assert not is_override("configs/dapo.yaml")
    assert all(map(is_override, ("a=1", "+a.b", "~a", "++a=x.yaml")))
