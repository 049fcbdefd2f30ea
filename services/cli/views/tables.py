"""Tables for other programs: rows of figures as CSV, JSON lines or parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from millrace.records import JsonObject
from services.common.data.parquet import to_parquet


def table_bytes(rows: Sequence[JsonObject], form: str) -> bytes:
    """The rows as `csv`, `jsonl` or `parquet`, with a column for each name in any row, in order of appearance.

    In CSV and parquet, what is itself an object or a list is JSON text. A value that a row lacks, or is null, is empty in CSV.
    """
    if form == "jsonl":
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
    names = list(dict.fromkeys(name for row in rows for name in row))
    flat = [{name: _flat(row.get(name)) for name in names} for row in rows]
    return to_parquet(flat) if form == "parquet" else _csv(names, flat)


def _flat(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _csv(names: Sequence[str], rows: Sequence[JsonObject]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
