"""Preparation of data, from files to files: what is taken, what is not and why, and the same output whoever works on it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from examples.demo.charlm_tokenizer import make_tokenizer, save_tokenizer
from services.cli.prepare import run as module
from services.cli.prepare.run import run
from services.cli.prepare.settings import PrepareSettings, read_settings
from services.common.config.settings import Settings
from services.common.data.source import open_source
from services.common.data.trial import check_source
from services.common.errors import ConfigError, DataError
from services.common.spec.data import DataSourceSpec

ROOT = Path(__file__).parents[4]
ROWS = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(3000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(make_tokenizer(1024), folder)
    return str(folder)


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=700)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def prepared(source: Path, **settings: Any) -> dict[str, Any]:
    output = source.parent / "out" / "x"
    values = {"input": str(source), "output_prefix": str(output), "handler_name": "gsm8k", "overwrite": True}
    return run(read_settings(values | settings), lambda *_: None)


def rejected(summary: dict[str, Any]) -> list[tuple[int, str, str]]:
    lines = Path(summary["files"]["rejected.jsonl"]).read_text().splitlines()
    return [(row["row"], row["reason"], row["detail"]) for row in map(json.loads, lines)]


def contents(summary: dict[str, Any]) -> dict[str, bytes]:
    return {name: Path(path).read_bytes() for name, path in summary["files"].items()}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "arrow", "parquet"])
def test_each_kind_of_file_gives_the_same_tasks_in_order(tmp_path: Path, suffix: str) -> None:
    summary = prepared(write(tmp_path / f"rows.{suffix}", ROWS))
    assert (summary["rows"], summary["taken"]) == (3000, {"train": 3000})
    assert summary["rejected"] == {"broken": 0, "overlong": 0, "duplicate": 0}
    rows = parquet.read_table(summary["files"]["train.parquet"]).to_pylist()
    assert [row["reward_model"] for row in rows] == [{"style": "rule", "ground_truth": str(n + 1)} for n in range(3000)]
    assert rows[7] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 7 + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"file": f"rows.{suffix}", "row": 8, "split": "train"},
    }


def test_rows_that_are_not_taken_are_counted_and_named_with_their_reason(tmp_path: Path, tokenizer: str) -> None:
    rows = [
        *ROWS[:3],
        "{",
        "",
        ROWS[1],
        {"question": "q", "answer": "none"},
        ROWS[0] | {"answer": "#### 9"},
        {**ROWS[4], "question": "x" * 300},
    ]
    summary = prepared(write(tmp_path / "rows.jsonl", rows), tokenizer_name_or_path=tokenizer, seq_length=100)
    assert (summary["rows"], summary["taken"]) == (8, {"train": 3})
    assert summary["rejected"] == {"broken": 2, "overlong": 1, "duplicate": 2}
    assert summary["duplicates_with_another_answer"] == 1
    found = rejected(summary)
    assert [(number, reason) for number, reason, _ in found] == [
        (4, "broken"), (6, "duplicate"), (7, "broken"), (8, "duplicate"), (9, "overlong"),
    ]  # fmt: skip
    assert "Expecting" in found[0][2]
    assert found[1][2] == "the same prompt as rows.jsonl: row 2"
    assert "#### <number>" in found[2][2]
    assert found[3][2] == "the same prompt as rows.jsonl: row 1, with another answer"
    assert found[4][2] == "the prompt has 302 tokens; seq_length is 100"
    assert summary["prompt_tokens"] == {"min": 14, "mean": 14, "median": 14, "p95": 14, "max": 14}
    assert summary["examples"]["overlong"] == ["rows.jsonl: row 9: the prompt has 302 tokens; seq_length is 100"]


@pytest.mark.parametrize(("limit", "taken"), [(14, 0), (15, 1)])
def test_a_prompt_of_as_many_tokens_as_the_limit_is_dropped(
    tmp_path: Path, tokenizer: str, limit: int, taken: int
) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS[:1])
    settings = {"tokenizer_name_or_path": tokenizer, "seq_length": limit}
    if taken:
        assert prepared(source, **settings)["taken"] == {"train": 1}
        return
    with pytest.raises(DataError, match=r"^input: no row was taken: rows\.jsonl: row 1: the prompt has 14 tokens"):
        prepared(source, **settings)


def test_without_a_template_only_the_texts_are_counted(tmp_path: Path, tokenizer: str) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS[:1])
    summary = prepared(source, tokenizer_name_or_path=tokenizer, chat_template="none")
    assert summary["prompt_tokens"]["max"] == 12  # without the marks of user and assistant


@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_output_is_byte_equal_whatever_the_number_of_workers(tmp_path: Path, tokenizer: str, suffix: str) -> None:
    source = write(tmp_path / f"rows.{suffix}", [*ROWS, *ROWS[:50]])
    settings = {"tokenizer_name_or_path": tokenizer, "seq_length": 17, "validation_share": 0.1}
    alone = contents(prepared(source, workers=1, **settings))
    assert contents(prepared(source, workers=3, **settings)) == alone
    assert contents(prepared(source, workers=1, seed=5, **settings)) != alone


def test_the_split_follows_the_seed_and_the_prompt_alone(tmp_path: Path) -> None:
    def held_out(rows: list[Any], seed: int) -> set[str]:
        summary = prepared(write(tmp_path / "rows.jsonl", rows), validation_share=0.2, seed=seed)
        table = parquet.read_table(summary["files"]["validation.parquet"])
        train = parquet.read_table(summary["files"]["train.parquet"])
        assert table.num_rows + train.num_rows == len(rows)
        return {row["prompt"][0]["content"] for row in table.to_pylist()}

    first = held_out(ROWS, 1)
    assert first == held_out(ROWS, 1)
    assert held_out(ROWS[::-2], 1) == first & {row["question"] for row in ROWS[::-2]}
    assert first != held_out(ROWS, 2)
    assert abs(len(first) - 600) < 5 * (3000 * 0.2 * 0.8) ** 0.5


def test_output_is_taken_by_admission_and_as_training_data(tmp_path: Path) -> None:
    summary = prepared(write(tmp_path / "rows.jsonl", ROWS), validation_share=0.1, prompt_type="qwen_r1")
    folder = Path(summary["files"]["train.parquet"]).parent
    facts = check_source({"source": "x_train.parquet"}, [str(folder)], {}, "data.train", time.monotonic() + 20)
    assert (facts["tasks"], facts["all_checked"]) == (summary["taken"]["train"], True)
    assert facts["data_sources"] == ["openai/gsm8k"]
    source = open_source(DataSourceSpec(source="x_validation.parquet"), Settings(home=tmp_path, data_roots=[folder]))
    assert len(source) == summary["taken"]["validation"]
    assert source[0].extra_info["split"] == "validation"
    assert [message.role for message in source[0].prompt] == ["system", "user"]
    assert source[0].prompt[1].content.startswith("A conversation between User and Assistant.")
    assert source[0].prompt[1].content.endswith(f"\nWhat is {int(source[0].ground_truth) - 1} + 1?")


def test_additional_columns_are_kept_as_text_and_labels_are_the_answer(tmp_path: Path) -> None:
    rows = [row | {"level": 3, "tags": ["a", "é"], "note": "n"} for row in ROWS[:2]]
    summary = prepared(
        write(tmp_path / "rows.jsonl", rows), dataset_additional_keys=["labels", "level", "tags", "note", "gone"]
    )
    extra = parquet.read_table(summary["files"]["train.parquet"]).to_pylist()[0]["extra_info"]
    kept = {"level": "3", "tags": '["a", "é"]', "note": "n", "gone": None}
    assert extra == {"file": "rows.jsonl", "row": 1, "split": "train"} | kept


def test_rows_without_a_reference_answer_need_a_default(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "Hello"}]}])
    with pytest.raises(DataError, match=r"row 1: `reward_model\.ground_truth \(or ground_truth\)` is missing"):
        prepared(source, handler_name="chat")
    summary = prepared(source, handler_name="chat", default_ground_truth="-")
    assert parquet.read_table(summary["files"]["train.parquet"]).to_pylist()[0]["reward_model"] == {
        "style": "model",
        "ground_truth": "-",
    }


def test_files_of_a_folder_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "b.json", ROWS[:2])
    write(folder / "a.jsonl", ROWS[1:4])
    (folder / "notes.txt").write_text("not data")
    output = str(tmp_path / "out" / "x")
    summary = run(
        read_settings({"input": str(folder), "output_prefix": output, "handler_name": "gsm8k"}), lambda *_: None
    )
    found = [
        (row["extra_info"]["file"], row["extra_info"]["row"])
        for row in parquet.read_table(summary["files"]["train.parquet"]).to_pylist()
    ]
    assert found == [("a.jsonl", 1), ("a.jsonl", 2), ("a.jsonl", 3), ("b.json", 1)]


def test_a_folder_that_datasets_saved_is_read_without_the_files_beside_its_tables(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    write(folder / "data-00000-of-00002.arrow", ROWS[:2])
    write(folder / "data-00001-of-00002.arrow", ROWS[2:5])
    (folder / "state.json").write_text('{"_split": "train"}')
    (folder / "dataset_info.json").write_text("{}")
    assert prepared(folder)["taken"] == {"train": 5}


def test_a_csv_row_with_other_cells_than_the_header_is_set_aside_and_quotes_hold_line_breaks(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffquestion,answer\n"a,\nb",#### 1\nc,d,#### 2\ne,#### 3\n')
    summary = prepared(file)
    assert rejected(summary) == [(2, "broken", "has 3 cells, and the header 2")]
    rows = parquet.read_table(summary["files"]["train.parquet"]).to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == ["a,\nb", "e"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.json",
            '[{"question": "q", "answer": "#### 1"}, {"question": ',
            r"rows\.json: row 2: is not JSON, and nothing after it",
        ),
        ("rows.json", '{"question": "q"}', r"rows\.json: has no rows: it must be a JSON array"),
        ("rows.parquet", "PAR1 nonsense PAR1", r"rows\.parquet: is not a readable parquet file"),
        ("rows.txt", "a,b", r"must end in one of \.parquet, \.arrow, \.jsonl, \.json, \.csv"),
        ("rows.csv", "question,answer\n", r"rows\.csv: has no rows below its header"),
        ("rows.csv", 'question,answer\n"q"x,#### 1\n', r"rows\.csv: row 1: is not CSV in UTF-8, and nothing after it"),
        ("rows.arrow", "ARROW1 nonsense", r"rows\.arrow: is not a readable file in Arrow's stream format"),
        ("rows.jsonl", "\n", "no row was taken: the input has no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_leaves_no_output(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"^input: .*{message}"):
        prepared(tmp_path / name)
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_output_of_an_earlier_run_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", ROWS)
    first = prepared(source, validation_share=0.5)
    with pytest.raises(ConfigError, match=r"^output_prefix: .*x_train\.parquet is there already: set overwrite"):
        prepared(source, overwrite=False)
    second = prepared(source)
    assert set(second["files"]) == set(first["files"]) - {"validation.parquet"}
    assert not Path(first["files"]["validation.parquet"]).exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, r"^workers: "),
        ({"seq_len": 3}, r"^seq_len: "),
        ({"seq_length": 100}, r"set tokenizer_name_or_path"),
        ({"pack": True}, r"pack is not supported: the learner packs rows itself"),
        ({"map_keys": {"promt": "x"}}, r"'promt' is no role"),
        ({"tokenizer_type": "Other"}, r"^tokenizer_type: "),
        ({"handler_name": "none"}, r"^handler_name: there is no handler 'none'"),
        ({"prompt_type": "none"}, r"^prompt_type: there is no prompt type 'none'"),
        ({"tokenizer_name_or_path": "/nowhere"}, r"^tokenizer_name_or_path: /nowhere cannot be loaded"),
        ({"input": "/nowhere.jsonl"}, r"^input: /nowhere\.jsonl is not there"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(write(tmp_path / "rows.jsonl", ROWS[:1]), **settings)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "ijson" else name)
    settings = PrepareSettings(input="x", output_prefix="y", handler_name="gsm8k")
    module.check_packages(settings, [".jsonl"])
    with pytest.raises(ConfigError, match=r"not installed \(ijson\).*pip install 'millrace\[data\]'"):
        module.check_packages(settings, [".json"])


def millrace(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", "data", "prepare", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_takes_settings_of_mindspeed_rl_and_options_override_them(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"problem": f"What is {n}?", "answer": str(n)} for n in range(1500)]
    write(tmp_path / "deepscaler.json", rows)
    (tmp_path / "deepscaler.yaml").write_text(
        f"input: ./deepscaler.json\ntokenizer_name_or_path: {tokenizer}\noutput_prefix: ./dataset/data\n"
        "handler_name: R1AlpacaStyleInstructionHandler\ntokenizer_type: HuggingFaceTokenizer\nworkers: 2\nlog_interval: 1000\n"
        'prompt_type: qwen_r1\nmap_keys: {"prompt":"problem", "query":"", "response": "answer", "system":""}\n'
        'dataset_additional_keys: ["labels"]\n'
    )
    done = millrace("deepscaler.yaml", "--data-source", "deepscaler", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["taken"]) == (1500, {"train": 1500})
    assert summary["data_sources"] == {"deepscaler": 1500}
    assert "1,024 rows" in done.stderr
    again = millrace("deepscaler.yaml", cwd=tmp_path)
    assert again.returncode == 1
    assert again.stderr.endswith("data_train.parquet is there already: set overwrite to replace it\n")
    text = millrace("deepscaler.yaml", "--overwrite", "--workers", "1", cwd=tmp_path).stdout
    assert text.startswith(
        "1,500 rows: 1,500 train\nnot taken: 0 broken, 0 overlong, 0 duplicate\ntokens of a prompt: min "
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, workers: str) -> None:
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row | {"x": "y" * 200}) + "\n" for _ in range(60) for row in ROWS)
    arguments = ["--input", "rows.jsonl", "--handler-name", "gsm8k", "--output-prefix", "out/x", "--workers", workers]
    command = [sys.executable, "-m", "services.cli.main", "data", "prepare", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert "rows" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.endswith("interrupted: nothing was written\n")
    assert list((tmp_path / "out").iterdir()) == []


def peak_mib(folder: Path, rows: int) -> float:
    """Largest memory of a preparation of so many rows, in a process of its own."""
    source = folder / f"{rows}.jsonl"
    with source.open("w") as file:
        file.writelines(
            json.dumps({"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(rows)
        )
    code = (
        "import resource, sys\n"
        "from services.cli.prepare.run import run\n"
        "from services.cli.prepare.settings import read_settings\n"
        f"run(read_settings({{'input': {str(source)!r}, 'output_prefix': {str(folder / str(rows))!r}, 'handler_name': 'gsm8k'}}), "
        "lambda *_: None)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    return int(done.stdout) / 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    small, large = peak_mib(tmp_path, 5_000), peak_mib(tmp_path, 100_000)
    assert large < 1.2 * small
