"""Dataset files: the forms that people bring, and errors that name field, file and row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from services.common.codec import decode, encode
from services.common.data import TaskRecord, TaskSource, open_source
from services.common.errors import DataError
from services.common.settings import Settings
from services.common.spec import DataSourceSpec
from services.common.types import Message, Purpose, Task

ROW: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 6 × 7?"}],
    "ability": "MATH",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": "a-1"},
}
RECORD = TaskRecord((Message("user", "What is 6 × 7?"),), "math_dapo", "42", {"index": "a-1"})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "home" / "data").mkdir(parents=True)
    (tmp_path / "root").mkdir()
    return Settings(home=tmp_path / "home", data_roots=[tmp_path / "root"])


def write(settings: Settings, rows: Sequence[object], name: str = "d.jsonl") -> None:
    path = settings.home / "data" / name
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


def opened(settings: Settings, rows: Sequence[object], name: str = "d.jsonl", **spec: Any) -> TaskSource:
    write(settings, rows, name)
    return open_source(DataSourceSpec(source=name, **spec), settings)


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_the_usual_columns_are_read(settings: Settings, name: str) -> None:
    source = opened(settings, [ROW, ROW | {"prompt": [{"role": "user", "content": "And 1?"}]}], name)
    assert len(source) == 2
    assert source[0] == RECORD
    assert source[1].prompt[0].content == "And 1?"


def test_a_prompt_may_be_text(settings: Settings) -> None:
    assert opened(settings, [ROW | {"prompt": "What is 6 × 7?"}])[0] == RECORD


def test_gsm8k_is_read_as_it_is(settings: Settings) -> None:
    row = {"question": "How many?", "answer": "It is 1,000 + 80 = <<1000+80=1080>>1080\n#### 1,080"}
    assert opened(settings, [row])[0] == TaskRecord((Message("user", "How many?"),), "openai/gsm8k", "1080", {})


@pytest.mark.parametrize(
    ("value", "expected"), [(42, "42"), (-3, "-3"), (42.0, "42"), (0.5, "0.5"), ("x^2", "x^2"), ("42", "42")]
)
@pytest.mark.parametrize("nested", [True, False])
def test_ground_truths_become_text(settings: Settings, value: object, expected: str, nested: bool) -> None:
    truth = {"reward_model": {"ground_truth": value}} if nested else {"reward_model": None, "ground_truth": value}
    assert opened(settings, [ROW | truth])[0].ground_truth == expected


def test_empty_lines_are_skipped_and_a_byte_order_mark_is_no_row(settings: Settings) -> None:
    source = opened(settings, ["\ufeff" + json.dumps(ROW), "", "  ", ROW])
    assert [source[index] for index in range(len(source))] == [RECORD, RECORD]


def test_size_cuts_the_file(settings: Settings) -> None:
    assert len(opened(settings, [ROW] * 5, size=3)) == 3
    assert len(opened(settings, [ROW] * 5, size=9)) == 5


def test_a_row_beyond_the_end_is_an_index_error(settings: Settings) -> None:
    source = opened(settings, [ROW] * 2)
    for index in (2, -1):
        with pytest.raises(IndexError):
            source[index]


def test_system_prompt_template_and_data_source_are_applied(settings: Settings) -> None:
    messages = [
        {"role": "system", "content": "old"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three {x}"},
    ]
    source = opened(
        settings,
        [ROW | {"prompt": messages}],
        system_prompt="new",
        prompt_template="Q: {prompt}\nA:",
        data_source="mine",
    )
    assert source[0].data_source == "mine"
    assert source[0].prompt == (
        Message("system", "new"),
        Message("user", "one"),
        Message("assistant", "two"),
        Message("user", "Q: three {x}\nA:"),
    )


def test_a_job_may_give_the_data_source_that_rows_lack(settings: Settings) -> None:
    assert opened(settings, [ROW | {"data_source": None}], data_source="mine")[0].data_source == "mine"


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_the_fingerprint_follows_content_and_settings(settings: Settings, name: str) -> None:
    first = opened(settings, [ROW], name).fingerprint
    assert opened(settings, [ROW], name).fingerprint == first
    assert opened(settings, [ROW], name, system_prompt="s").fingerprint != first
    assert opened(settings, [ROW, ROW], name).fingerprint != first


def test_every_record_can_travel(settings: Settings) -> None:
    extra = {"big": 2**80, "deep": [{"a": None}], "half": "\ud800", "x": 0.5}
    record = opened(settings, [ROW | {"extra_info": extra}])[0]
    task = Task(
        job_id="j", lineage=0, group_id=0, attempt=1, purpose=Purpose.TRAIN, prompt=record.prompt, data_source=record.data_source,
        ground_truth=record.ground_truth, extra_info=record.extra_info, group_size=8, temperature=1.0, max_tokens=8,
        min_policy_version=0, timeout_s=1.0,
    )  # fmt: skip
    assert decode(Task, encode(task)).extra_info["big"] == str(2**80)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "Expecting"),
        ("[]", "must be a JSON object, not list"),
        ('{"prompt": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "recursion"),
        ({}, "`data_source` is missing"),
        ({k: v for k, v in ROW.items() if k != "prompt"}, "`prompt` is missing"),
        (ROW | {"prompt": ""}, "`prompt` is empty"),
        (ROW | {"prompt": []}, "`prompt` is empty"),
        (ROW | {"prompt": [{"role": "user", "content": " "}]}, "`prompt` is empty"),
        (ROW | {"prompt": 7}, "`prompt` must be text or a list"),
        (ROW | {"prompt": ["hi"]}, r"`prompt\[0\]` must be an object"),
        (ROW | {"prompt": [{"role": "wizard", "content": "x"}]}, r"`prompt\[0\]\.role` must be one of .*'wizard'"),
        (ROW | {"prompt": [{"role": "user", "content": ["x"]}]}, r"`prompt\[0\]\.content` must be text, not list"),
        (ROW | {"prompt": "\ud800"}, "`prompt` is not valid Unicode"),
        (ROW | {"data_source": 3}, "`data_source` must be text"),
        (ROW | {"reward_model": {"style": "rule"}}, r"`reward_model\.ground_truth \(or ground_truth\)` is missing"),
        (ROW | {"reward_model": {"ground_truth": " "}}, "ground_truth.* is empty"),
        (ROW | {"reward_model": {"ground_truth": True}}, "ground_truth.* must be text or a finite number, not bool"),
        (ROW | {"reward_model": {"ground_truth": ["1"]}}, "ground_truth.* must be text or a finite number, not list"),
        (ROW | {"extra_info": "x"}, "`extra_info` must be an object"),
        ({"question": "q"}, "`answer` is missing"),
        ({"question": "", "answer": "#### 1"}, "`question` is empty"),
        ({"question": "q", "answer": "42"}, "`answer` does not end in `#### <number>`"),
        ({"question": "q", "answer": "#### many"}, "`answer` does not end in `#### <number>`"),
    ],
)
def test_a_broken_row_is_named_by_field_file_and_number(settings: Settings, row: object, message: str) -> None:
    with pytest.raises(DataError, match=r"(?s)^data\.train\.source: .*d\.jsonl: row 3: .*" + message):
        opened(settings, [ROW, "", row, ROW])


def test_a_broken_parquet_row_is_named_by_its_number(settings: Settings) -> None:
    with pytest.raises(DataError, match=r"d\.parquet: row 2: `reward_model\.ground_truth"):
        opened(settings, [ROW, ROW | {"reward_model": {"style": "rule", "ground_truth": None}}], "d.parquet")


def test_a_broken_row_beyond_the_size_is_not_read(settings: Settings) -> None:
    assert len(opened(settings, [ROW, "{"], size=1)) == 1


def test_parquet_without_prompts_is_refused_with_its_columns(settings: Settings) -> None:
    with pytest.raises(DataError, match=r"d\.parquet: has no column `prompt`.*its columns: text, label"):
        opened(settings, [{"text": "a", "label": 1}], "d.parquet")


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_a_file_without_rows_is_refused(settings: Settings, name: str) -> None:
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist([ROW]).slice(0, 0), settings.home / "data" / name)
    else:
        (settings.home / "data" / name).write_text("\n \n")
    with pytest.raises(DataError, match=rf"^data\.train\.source: .*{name}: has no rows"):
        open_source(DataSourceSpec(source=name), settings)


def test_what_is_not_parquet_is_refused(settings: Settings) -> None:
    (settings.home / "data" / "d.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"d\.parquet: is not a readable parquet file"):
        open_source(DataSourceSpec(source="d.parquet"), settings)


def test_a_missing_file_is_named_with_its_field(settings: Settings) -> None:
    with pytest.raises(DataError, match=r"^data\.eval\.source: .*gone\.jsonl is not there"):
        open_source(DataSourceSpec(source="gone.jsonl"), settings, field="data.eval")


def test_files_are_found_in_data_roots_by_both_kinds_of_path(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "root" / "sub" / "d.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(ROW))
    assert open_source(DataSourceSpec(source="sub/d.jsonl"), settings)[0] == RECORD
    assert open_source(DataSourceSpec(source=str(path)), settings)[0] == RECORD


@pytest.mark.parametrize("source", ["/etc/x.jsonl", "../x.jsonl", "link.jsonl"])
def test_what_leads_outside_the_roots_is_refused(settings: Settings, tmp_path: Path, source: str) -> None:
    outside = tmp_path / "secret.jsonl"
    outside.write_text(json.dumps(ROW))
    (settings.home / "data" / "link.jsonl").symlink_to(outside)
    with pytest.raises(DataError, match=r"^data\.train\.source: "):
        open_source(DataSourceSpec(source=source), settings)


def test_a_file_takes_no_procedural_config(settings: Settings) -> None:
    with pytest.raises(DataError, match=r"^data\.train\.config: "):
        opened(settings, [ROW], config={"min_terms": 2})
