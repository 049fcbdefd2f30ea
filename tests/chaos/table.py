"""`python -m tests.chaos.table`: writes the table of docs/reliability.md anew from what `tests.chaos.run` has recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.chaos.rows import ROWS, Row

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "chaos" / "records.jsonl"
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: written by python -m tests.chaos.table -->", "<!-- end of the table -->"


def main() -> None:
    """Replaces what is between the marks."""
    known: dict[str, dict[str, Any]] = {}
    if RECORDS.exists():
        for line in RECORDS.read_text().splitlines():
            record = json.loads(line)
            known[record["command"]] = record  # the newest counts
    lines = ["| fault | must hold | found | went on after p50 / p95 / max |", "|---|---|---|---|"]
    lines += [_line(row, known.get(row.command)) for row in ROWS]
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")
    sys.stdout.write(f"{sum(row.command in known for row in ROWS)} of {len(ROWS)} rows have been run\n")


def _line(row: Row, record: dict[str, Any] | None) -> str:
    what = f"{row.what}<br>`{row.command}`"
    if record is None:
        return f"| {what} | {row.holds} | not run yet | |"
    trials = f"{record['count']:,} trials"
    if record["violations"]:
        found = (
            f"**{len(record['violations'])} violations** in {trials}: {record['violations'][0].splitlines()[0][:120]}"
        )
    else:
        found = f"0 violations in {trials} (< {record['bound']:.2g} at 95 %)"
    if record["groups"]:
        found += f"; {record['groups']['issued']:,} groups"
    times = record["progress_s"]
    return f"| {what} | {row.holds} | {found} | {'{p50} / {p95} / {max} s'.format(**times) if times else ''} |"


if __name__ == "__main__":
    main()
