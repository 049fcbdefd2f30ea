"""Files that are larger than the memory that reads them: the same rows, whatever is kept; and files that change."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from services.common.config.settings import Settings
from services.common.data import content, jsonl, row_groups
from services.common.data.bounds import DataBounds
from services.common.data.content import Content
from services.common.data.files import FileSource
from services.common.data.trial import check_source
from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec

ROOT = Path(__file__).parents[3]


def rows_of(count: int, extra: int = 40) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n}: " + "x" * (n % extra), "data_source": "s", "ground_truth": str(n), "extra_info": {"n": n}}
        for n in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]], group: int = 50) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, until: float | None = None, **spec: Any) -> FileSource:
    return FileSource(
        path, DataSourceSpec(source=path.name, **spec), field="data.train", bounds=DataBounds(), until=until
    )


@pytest.mark.parametrize("kept", [1, 4000, 96 << 20])
@pytest.mark.parametrize("group", [1, 7, 50, 1000])
@pytest.mark.parametrize("expects", ["nothing", "the order", "something else"])
def test_rows_in_any_order_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, group: int, expects: str
) -> None:
    monkeypatch.setattr(row_groups, "KEPT_BYTES", kept)
    source = opened(write(tmp_path / "d.parquet", rows_of(300), group))
    order = random.Random(group).sample(range(300), 120)
    if expects == "the order":
        source.expect(order)
    elif expects == "something else":
        source.expect(range(10, 20))
    assert [source[index].extra_info["n"] for index in order] == order


def test_a_row_group_is_unpacked_once_for_all_its_expected_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "KEPT_BYTES", 20_000)
    source = opened(write(tmp_path / "d.parquet", rows_of(1000), 250))
    groups = source._rows._groups  # type: ignore[union-attr]
    unpacked, batches = [], groups._batches

    def counting(numbers: Any) -> Any:
        unpacked.extend(numbers)
        return batches(numbers)

    monkeypatch.setattr(groups, "_batches", counting)
    order = random.Random(1).sample(range(1000), 100)
    source.expect(order)
    assert [source[index].ground_truth for index in order] == [str(index) for index in order]
    assert sorted(unpacked) == [0, 1, 2, 3]


@pytest.mark.parametrize("block", [1, 100, 1 << 16])
@pytest.mark.parametrize("piece", [3, 5, 64, 1 << 20])
def test_lines_are_found_however_the_file_is_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, piece: int
) -> None:
    monkeypatch.setattr(content, "PIECE_BYTES", piece)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", block)
    lines = [json.dumps(row) for row in rows_of(40)]
    path = tmp_path / "d.jsonl"
    path.write_text("\ufeff\n \n" + "\n \t\r\n\n".join(f"  {line}" for line in lines))
    source = opened(path)
    order = random.Random(block).sample(range(40), 40)
    assert [source[index].extra_info["n"] for index in order] == order
    assert [source._rows.row(index)[0] for index in (0, 1, 39)] == [3, 6, 120]


def test_rows_beyond_the_time_are_checked_when_they_are_read(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        rows = rows_of(20)
        rows[13]["ground_truth"] = ""
        source = opened(write(tmp_path / f"d.{suffix}", rows), until=0.0)
        assert (len(source), source.checked) == (20, 0)
        assert source[12].ground_truth == "12"
        with pytest.raises(DataError, match=rf"^data\.train: .*d\.{suffix}: row 14: .*ground_truth.* is empty"):
            source[13]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_that_changes_is_noticed_and_one_that_is_touched_or_replaced_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(row_groups, "KEPT_BYTES", 1)
    path = write(tmp_path / f"d.{suffix}", rows_of(200))
    source = opened(path)
    os.utime(path, ns=(1, 1))
    assert source[150].ground_truth == "150"
    with path.open("ab") as file:
        file.write(b'{"prompt": "one more"}\n')
    assert source[20].ground_truth == "20"
    other = write(tmp_path / f"other.{suffix}", rows_of(100, extra=7))
    other.replace(path)
    assert source[120].ground_truth == "120"
    second = opened(path)
    with path.open("r+b") as file:
        file.seek(10)
        file.write(b"?")
    with pytest.raises(DataError, match="has changed since it was opened"):
        second[70]


def test_admission_reads_no_more_of_a_large_file_than_the_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MIN_READ_BYTES", 0)
    for suffix, tasks in (("jsonl", 0), ("parquet", 300)):
        path = write(tmp_path / f"d.{suffix}", rows_of(300))
        facts = check_source({"source": path.name}, [str(tmp_path)], {}, "data.train", time.monotonic() - 1)
        assert (facts["fingerprint"], facts["checked"], facts["all_checked"]) == ("", 0, False)
        assert facts["tasks"] == tasks


def test_the_digest_is_that_of_all_bytes_whatever_was_read_before(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_bytes(os.urandom(3_000_000))
    whole = Content(path, DataBounds()).finish(b"x")
    begun = Content(path, DataBounds())
    next(begun.pieces())
    assert begun.read(2_999_990, 100) == path.read_bytes()[2_999_990:]
    assert begun.finish(b"x") == whole
    assert Content(path, DataBounds()).finish(b"y") != whole


CHILD = """
import resource, sys, time
from services.common.config.settings import Settings
from services.learner.groups.sources import Sources
from tests.unit.learner.scored_groups import job_spec

spec = job_spec(data={"train": {"source": "d.parquet"}, "seed": 3})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sources = Sources(spec.model_dump_json(), Settings(home=".", data_roots=[sys.argv[1]]).public(), 5.0)
sources.open_train()
made = [sources.training([ordinal], 1.0)[0][0] for ordinal in range(400)]
assert made == [sources.index(ordinal) for ordinal in range(400)]
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_file_of_half_a_gigabyte_takes_a_quarter_of_that(tmp_path: Path) -> None:
    """Row groups of 170 MB, in an order at random: larger than all that is kept."""
    texts = ["".join(random.Random(n).choices("abcdefghij", k=4000)) for n in range(64)]
    schema = pa.schema([("prompt", pa.string()), ("data_source", pa.string()), ("ground_truth", pa.string())])
    with parquet.ParquetWriter(tmp_path / "d.parquet", schema, compression="none", use_dictionary=False) as writer:
        for group in range(3):
            rows = range(group * 42_000, (group + 1) * 42_000)
            columns = {"prompt": [f"{n} {texts[n % 64]}" for n in rows], "data_source": ["s"] * 42_000}
            writer.write_table(pa.table(columns | {"ground_truth": [str(n) for n in rows]}, schema=schema))
    assert (tmp_path / "d.parquet").stat().st_size > 500_000_000
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    before, most = map(int, done.stdout.split())
    assert most - before < 250 * 1024
    assert Settings().max_data_bytes > 1 << 33
