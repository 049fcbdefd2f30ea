"""Dataset files: the forms that people bring, and errors that name field, file and row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.data.record import TaskRecord, TaskSource
from services.common.data.source import data_roots, open_source, open_within
from services.common.data.trial import check_source
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec
from services.common.streams.codec import decode, encode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import Message, Purpose, Task

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


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_prompt_and_answer_may_be_in_columns_of_any_name(settings: Settings, name: str) -> None:
    row = {
        "problem": "What is 6 × 7?",
        "solution": 42.0,
        "data_source": ROW["data_source"],
        "extra_info": ROW["extra_info"],
    }
    source = opened(settings, [row, row], name, prompt_key="problem", answer_key="solution")
    assert [source[0], source[1]] == [RECORD, RECORD]
    both = opened(settings, [ROW | row | {"prompt": "other"}], name, prompt_key="problem", answer_key="solution")
    assert both[0] == RECORD, "the named columns win"


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_a_named_column_that_is_not_there_is_named_with_its_setting(settings: Settings, name: str) -> None:
    with pytest.raises(DataError, match=r"d\.\w+: .*`problm`.*which prompt_key names"):
        opened(settings, [ROW], name, prompt_key="problm")
    with pytest.raises(DataError, match=r"row 2: `problem` is missing, which prompt_key names"):
        opened(settings, [ROW | {"problem": "x"}, ROW | {"problem": None}], name, prompt_key="problem")


def test_columns_that_are_not_named_leave_the_fingerprint_as_it_was(settings: Settings) -> None:
    plain, named = opened(settings, [ROW]), opened(settings, [ROW], prompt_key="prompt")
    assert plain.fingerprint == "7f99325de75a64075b0e31e86235b8cf", "of releases without these settings"
    assert named.fingerprint != plain.fingerprint


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
    assert decode(Task, encode(task, MIN_ENTRY_BYTES), MIN_ENTRY_BYTES).extra_info["big"] == str(2**80)


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


def refusal(settings: Settings, name: str = "d.jsonl", bounds: DataBounds | None = None, **spec: Any) -> str:
    """What is said of the file."""
    source = DataSourceSpec(source=name, **spec)
    with pytest.raises(DataError) as caught:
        open_within(source, data_roots(settings), bounds or DataBounds(), field="data.train")
    message = str(caught.value)
    where = f"data.train.source: {settings.home / 'data' / name}: "
    assert message.startswith(where)
    assert len(message) < len(where) + 500
    assert "\n" not in message
    return message.removeprefix(where)


def traced(action: Callable[[], object]) -> int:
    """Bytes that Python allocated at most during the action."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_line_of_a_hundred_megabytes_is_refused_before_it_is_parsed(settings: Settings) -> None:
    line = json.dumps(ROW | {"extra_info": {"x": ["y"] * 4}}).replace('"y"', '"y"' + " " * (25 << 20))
    write(settings, [ROW, line])
    size = len(line)
    peak = traced(lambda: refusal(settings))
    assert refusal(settings) == f"row 2: has {size} bytes; MILLRACE_MAX_ROW_BYTES=8388608 are taken at the most"
    assert peak < 2 * size


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_a_file_beyond_the_bound_is_not_read(settings: Settings, name: str) -> None:
    path = settings.home / "data" / name
    path.touch()
    os.truncate(path, 3 << 30)  # a hole: no room on the disk
    bounds = DataBounds(max_data_bytes=2 << 30)
    peak = traced(lambda: refusal(settings, name, bounds))
    assert "has 3221225472 bytes; MILLRACE_MAX_DATA_BYTES=2147483648" in refusal(settings, name, bounds)
    assert peak < 1 << 20


def test_empty_lines_take_no_memory_of_their_own(settings: Settings) -> None:
    content = b"\n \t\r\n" * 4_000_000 + json.dumps(ROW).encode()
    (settings.home / "data" / "d.jsonl").write_bytes(content)
    source = DataSourceSpec(source="d.jsonl")
    assert traced(lambda: open_source(source, settings)) < len(content) + (4 << 20)
    assert open_source(source, settings)[0] == RECORD


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW | {"prompt": "x" * 300_000}, "the prompt has 300000 characters; MILLRACE_MAX_PROMPT_CHARS=262144"),
        (ROW | {"prompt": [{"role": "user", "content": "x" * 90_000}] * 3}, "the prompt has 270000 characters"),
        (ROW | {"ground_truth": "1" * 300_000, "reward_model": None}, "the ground truth has 300000 characters"),
        (ROW | {"data_source": "x" * 257}, "`data_source` has 257 characters"),
        (ROW | {"extra_info": {"x": "y" * 3_000_000}}, "bytes; at most 2097152 can be sent"),
        ('{"prompt": ' + "[" * 100_000, "recursion"),
        ('{"extra_info": ' + '{"a":' * 700 + "1" + "}" * 700 + "}", ""),
        (json.dumps(ROW)[:-1] + ', "extra_info": ' + '{"a":' * 600 + "1" + "}" * 600 + "}", ""),
        (json.dumps(ROW | {"ground_truth": 7, "reward_model": None}).replace("7}", "9" * 5000 + "}"), "4300 digits"),
        ("[" + "1," * 1000 + "1]", "must be a JSON object, not list"),
        ('{"prompt": NaN}', "NaN is not a JSON number"),
        ('{"prompt": "a"', "delimiter"),
    ],
)
def test_a_row_beyond_the_bounds_is_named(settings: Settings, row: object, words: str) -> None:
    write(settings, [ROW, "", row])
    said = refusal(settings)
    assert said.startswith("row 3: ")
    assert words in said


def test_bytes_that_are_no_text_are_named_by_line(settings: Settings) -> None:
    (settings.home / "data" / "d.jsonl").write_bytes(json.dumps(ROW).encode() + b'\n{"prompt": "\xff\xfe"}\n')
    assert refusal(settings).startswith("row 2: 'utf-8' codec can't decode byte 0xff")


def nothings(rows: int, count: int) -> Any:
    """An object in each row; the last has a list of so many nulls, which take no room at all."""
    offsets = pa.array([*range(rows), count], pa.int32())
    return pa.StructArray.from_arrays([pa.ListArray.from_arrays(offsets, pa.nulls(count))], ["n"])


@pytest.mark.parametrize(
    ("columns", "most", "words"),
    [
        ({"prompt": ["x" * 1_000_000] * 4}, 64, "row 1: the prompt has 1000000"),
        ({"prompt": ["x" * 10_000] * 8000}, 16, "unpacks to "),
        ({"prompt": ["x"] * 4, "extra_info": [{"z": "0" * 20_000_000}] * 4}, 64, "unpacks to 800"),
        ({"prompt": ["x"] * 4, "extra_info": nothings(4, 20_000_000)}, 64, "unpacks to 160"),
        ({"prompt": ["x"] * 4, "extra_info": nothings(4, 2_000_000)}, 64, "row 4: has 2000"),
        ({"prompt": ["x"] * 4, "extra_info": [{"z": "0" * 9_000_000}] * 4}, 64, "row 1: has 9000"),
        ({f"column_{number}": ["1"] * 4 for number in range(3000)}, 64, "has no column `prompt`"),
    ],
)
def test_a_parquet_bomb_is_refused(settings: Settings, columns: dict[str, Any], most: int, words: str) -> None:
    rows = len(next(iter(columns.values())))
    path = settings.home / "data" / "bomb.parquet"
    made = pa.table(columns | {"ground_truth": ["1"] * rows})
    parquet.write_table(made, path, compression="zstd", use_dictionary=["prompt"])
    assert path.stat().st_size < 1 << 20
    assert words in refusal(settings, path.name, DataBounds(max_data_bytes=most << 20), data_source="x")


def test_a_parquet_bomb_takes_no_memory_worth_mentioning(settings: Settings) -> None:
    path = settings.home / "data" / "bomb.parquet"
    schema = pa.schema([("prompt", pa.string()), ("ground_truth", pa.string())])
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(50):
            writer.write_table(pa.table({"prompt": ["x" * 200_000] * 400, "ground_truth": ["1"] * 400}, schema=schema))
    assert path.stat().st_size < 1 << 20  # 4 GB once it is unpacked
    code = (
        "import resource, sys\n"
        "from services.common.data.trial import check_source\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "source, bounds = {'source': 'bomb.parquet', 'data_source': 'x'}, {'max_data_bytes': 64 << 20}\n"
        "try:\n"
        f"    check_source(source, [{str(path.parent)!r}], bounds, 'data.train', 1e9)\n"
        "except Exception as error:\n"
        "    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "unpacks to " in said
    assert int(said.split()[-1]) < 256 * 1024  # KiB


def test_columns_may_lie_in_any_order_and_forbid_nulls(settings: Settings) -> None:
    fields = [("ground_truth", pa.string()), ("extra", pa.int8()), ("prompt", pa.string())]
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])
    made = pa.table({"ground_truth": ["1", "2"], "extra": [1, 2], "prompt": ["a", "b"]}, schema=schema)
    parquet.write_table(made, settings.home / "data" / "d.parquet")
    source = open_source(DataSourceSpec(source="d.parquet", data_source="x"), settings)
    assert [(source[index].prompt[0].content, source[index].ground_truth) for index in (0, 1)] == [
        ("a", "1"),
        ("b", "2"),
    ]


def test_a_column_that_is_there_twice_is_named(settings: Settings) -> None:
    made = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(made, settings.home / "data" / "d.parquet")
    assert refusal(settings, "d.parquet") == "has more than one column `prompt`"


def test_a_column_with_a_dictionary_is_read_as_what_it_stands_for(settings: Settings) -> None:
    texts = [f"{number} " + "x" * 1000 for number in range(12_000)]  # a dictionary beyond the bound of a row
    prompts = pa.DictionaryArray.from_arrays(pa.array(range(12_000), pa.int32()), pa.array(texts))
    path = settings.home / "data" / "d.parquet"
    parquet.write_table(pa.table({"prompt": prompts, "ground_truth": ["1"] * 12_000}), path)
    source = open_source(DataSourceSpec(source="d.parquet", data_source="x"), settings)
    assert [source[index].prompt[0].content for index in (0, 7, 11_999)] == [texts[0], texts[7], texts[-1]]


def test_text_that_is_no_unicode_is_named_by_its_own_row(settings: Settings) -> None:
    prompts = pa.array([b"a"] * 40 + [b"\xff"] + [b"b"] * 40).view(pa.string())
    made = pa.table({"prompt": prompts, "ground_truth": ["1"] * 81})
    parquet.write_table(made, settings.home / "data" / "d.parquet")
    assert refusal(settings, "d.parquet", data_source="x").startswith("row 41: 'utf-8' codec can't decode")


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
@pytest.mark.parametrize("size", [None, 1, 64, 65, 5000, 9000])
def test_rows_keep_content_and_order_however_the_file_is_cut(settings: Settings, name: str, size: int | None) -> None:
    rows = [ROW | {"reward_model": {"style": "rule", "ground_truth": str(number)}} for number in range(9000)]
    if name.endswith(".parquet"):
        path = settings.home / "data" / name
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    else:
        write(settings, rows, name)
    source = open_source(DataSourceSpec(source=name, size=size), settings)
    assert [source[index].ground_truth for index in range(len(source))] == [
        str(number) for number in range(size or 9000)
    ]


def test_fingerprints_are_those_of_older_releases(settings: Settings) -> None:
    """A checkpoint is refused when its data's fingerprint has changed."""
    assert opened(settings, [ROW]).fingerprint == "7f99325de75a64075b0e31e86235b8cf"
    assert (
        opened(settings, ["\ufeff" + json.dumps(ROW), "", ROW], size=2).fingerprint
        == "fb834f395944f55de31c9df686371482"
    )


def test_no_time_left_is_said_and_every_row_is_counted(settings: Settings) -> None:
    for name in ("d.jsonl", "d.parquet"):
        write(settings, [ROW] * 200, name)
        facts = check_source({"source": name}, [str(root) for root in data_roots(settings)], {}, "data.train", 0.0)
        assert facts["fingerprint"]
        assert facts | {"fingerprint": ""} == {
            "fingerprint": "",
            "tasks": 200,
            "checked": 0,
            "all_checked": False,
            "data_sources": [],
        }


def test_a_trial_names_the_data_sources(settings: Settings) -> None:
    write(settings, [ROW, ROW | {"data_source": "other"}])
    roots, bounds = [str(root) for root in data_roots(settings)], asdict(DataBounds.of(settings))
    facts = check_source({"source": "d.jsonl"}, roots, bounds, "data.train", time.monotonic() + 20)
    assert facts["fingerprint"]
    assert facts | {"fingerprint": ""} == {
        "fingerprint": "",
        "tasks": 2,
        "checked": 2,
        "all_checked": True,
        "data_sources": ["math_dapo", "other"],
    }
