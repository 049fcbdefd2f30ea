"""YAML 1.2 and JSON as plain values; what is written reads the same by either version of YAML."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.common.spec.document import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_SCALAR_CHARS,
    MAX_VALUES,
    dump_document,
    parse_document,
    parse_json,
    parse_recorded,
    parse_yaml,
)
from services.common.spec.job import dump_spec, parse_recorded_spec, parse_spec

JOBS = sorted((Path(__file__).parents[4] / "deploy/config/jobs").glob("*.yaml"))
LOOKALIKES = [
    *(
        "on",
        "no",
        "y",
        "1:30",
        "1:59:59",
        "0123",
        "08",
        "0o17",
        "0x1F",
        "0b11",
        "1e5",
        "1e-5",
        "1e400",
        "1_000",
        ".5",
        "5.",
        "+1",
    ),
    *(
        "null",
        "NULL",
        "~",
        "",
        "true",
        "False",
        ".inf",
        "-.INF",
        ".nan",
        "2024-01-01",
        "2024-01-01 10:00:00",
        "=",
        "<<",
    ),
    *("%TAG", "- a", "a: b", "# a", "&a", "*a", "!!int 3", " a ", "a\nb", "\u2028", "😀"),
]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[on, off, yes, no, y]", ["on", "off", "yes", "no", "y"]),
        ("[true, True, FALSE, false]", [True, True, False, False]),
        ("[1:30, 1:59:59, 190:20:30.15]", ["1:30", "1:59:59", "190:20:30.15"]),
        ("[0123, -08, +3, 0o17, 0x1F, 0]", [123, -8, 3, 15, 31, 0]),
        ("[1e-5, 1E5, 6.0e-4, .5, 5., -.inf, +.INF]", [1e-5, 1e5, 6e-4, 0.5, 5.0, -math.inf, math.inf]),
        ("[null, Null, NULL, ~, , '']", None),
        ("{a: , b: ~, c: null}", {"a": None, "b": None, "c": None}),
        ("[2024-01-01, 1_000, =, <<, 0b11]", ["2024-01-01", "1_000", "=", "<<", "0b11"]),
        ('!!float "3.5"', 3.5),
        ("!!str 123", "123"),
        ("!!null ''", None),
    ],
)
def test_plain_scalars_mean_what_the_core_schema_of_yaml_1_2_says(text: str, value: object) -> None:
    if value is None and text.startswith("["):
        with pytest.raises(ConfigError):  # an empty entry of a list is no YAML
            parse_yaml(text)
    else:
        assert parse_yaml(text) == value
        assert repr(parse_yaml(text)) == repr(value)  # 1 is not True, nor 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"key 'a' is given twice \(line 3\)"),
        ("a: {b: 1, b: 2}", r"key 'b' is given twice \(line 1\)"),
        ("{[a]: b}", "a key must be a plain value"),
        ("a: &x 1\nb: *x", r"aliases .*line 2"),
        ("a: &x [*x]", "aliases"),
        ("a: !!python/object/apply:os.system [id]", "tag .* is not accepted"),
        ("a: !!binary aGk=", "tag '!!binary' is not accepted"),
        ("a: !thing 1", "tag '!thing' is not accepted"),
        ('a: !!int "1:59:59"', "'1:59:59' is no int"),
        ("!!map [1]", "no mapping"),
        ("!!seq {a: 1}", "expected a sequence"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("\x00", "control characters"),
        (b"a: \xff", "not valid UTF-8: .* at byte 3"),
        (f"a: {'9' * (MAX_DIGITS + 1)}", f"more than {MAX_DIGITS} digits"),
        (f"a: {'x' * (MAX_SCALAR_CHARS + 1)}", f"more than {MAX_SCALAR_CHARS} characters"),
        (f"[{'1,' * MAX_VALUES}1]", f"more than {MAX_VALUES} values"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ("%TAG !a! tag:x\n" * 9 + "--- 1", "more than 8 lines"),
        ("a\n...\n" + "%TAG !a! tag:x\n" * 9 + "--- 1", "more than 8 lines"),
    ],
)
def test_what_is_no_document_or_beyond_the_bounds_says_why(text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_document(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "key 'a' is given twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        (f'{{"a": {"9" * (MAX_DIGITS + 1)}}}', f"more than {MAX_DIGITS} digits"),
        (f'["{"x" * (MAX_SCALAR_CHARS + 1)}"]', f"more than {MAX_SCALAR_CHARS} characters"),
        (f'{{"{"x" * (MAX_SCALAR_CHARS + 1)}": 1}}', f"more than {MAX_SCALAR_CHARS} characters"),
        (f"[{'1,' * MAX_VALUES}1]", f"more than {MAX_VALUES} values"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ("[" * 1_000_000, "not valid JSON"),
        (b"\xff\xfe\x00{", "not valid UTF-8"),
    ],
)
def test_json_has_the_same_bounds(text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_json(text)


def test_json_is_read_as_json_wherever_either_may_stand() -> None:
    assert parse_document('\ufeff {"a": "\\ud83d\\ude00", "b": 1e-5}') == {"a": "😀", "b": 1e-5}
    assert parse_document("{a: 1e-5}") == {"a": 1e-5}


MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "[",
            "{",
            "- ",
            "? ",
            ":",
            ",",
            "\n",
            " ",
            "\t",
            "#\n",
            "'",
            '"\\n',
            "9",
            "1:",
            "1:59:59,",
            "!!int 1:5,",
            "&a ",
            "!a ",
            "\ufeff",
        ),
        *("- 1:5\n", "a: 1\n", "|\n", "> a\n  ", "a\n\n", "--- a\n", "...\n"),
        *("%YAML 1.2\n", "%TAG !a! b\n", "a\n...\n%FOO x\n"),
    ],
)
@pytest.mark.parametrize("head", ["", "[", 'a: "'])
def test_a_mebibyte_of_anything_is_read_or_refused_in_less_than_a_second(head: str, unit: str) -> None:
    started = time.process_time()
    with contextlib.suppress(ConfigError):
        parse_document(head + unit * (MEBIBYTE // len(unit)))
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("text", LOOKALIKES)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    value = {"key": text, text: ["x", {"a": text}], "n": 1, "f": 1e-6, "t": True, "z": None}
    assert parse_yaml(dump_document(value)) == value
    assert yaml.safe_load(dump_document(value)) == value  # whoever still reads YAML 1.1
    assert (
        parse_recorded(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)) == value
    )  # what older releases wrote


TEXTS = st.one_of(st.sampled_from(LOOKALIKES), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


@given(VALUES)
def test_whatever_is_dumped_reads_back_the_same(value: object) -> None:
    text = dump_document(value)
    assert repr(parse_yaml(text)) == repr(value)
    assert repr(parse_recorded(text)) == repr(value)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_recorded_by_an_older_release_reads_as_the_same_spec(path: Path) -> None:
    spec = parse_spec(path.read_bytes())
    older = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    assert parse_recorded_spec(older) == spec
    assert parse_recorded_spec(dump_spec(spec)) == spec
    assert parse_spec(dump_spec(spec)) == spec
