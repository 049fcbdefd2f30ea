"""`python -m tests.chaos.table`: writes the table of docs/reliability.md anew from what `tests.chaos.run` has recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.chaos.result import missed
from tests.chaos.rows import ROWS, Row

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "chaos" / "records.jsonl"
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: written by python -m tests.chaos.table -->", "<!-- end of the table -->"
HEAD = "| fault | must hold | found | went on after p50 / p95 / max | machine |"

_TOLD_ELSEWHERE = {
    "command", "fault", "count", "seed", "violations", "missed", "bound", "groups", "progress_s", "seconds", "cores",
}  # fmt: skip


def main() -> None:
    """Replaces what is between the marks."""
    known: dict[str, dict[str, Any]] = {}
    if RECORDS.exists():
        for line in RECORDS.read_text().splitlines():
            record = json.loads(line)
            known[record["command"]] = record  # the newest counts
    lines = [HEAD, "|---|---|---|---|---|", *(line_of(row, known.get(row.command)) for row in ROWS)]
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")
    sys.stdout.write(f"{sum(row.command in known for row in ROWS)} of {len(ROWS)} rows have been run\n")


def line_of(row: Row, record: dict[str, Any] | None) -> str:
    """A row of the table, in Markdown; `record`: a line of the records, None when it was not run."""
    what = f"{row.what}<br>`{row.command}`"
    if record is None:
        return f"| {what} | {row.holds} | not run yet | | |"
    found = [_verdict(record)]
    if record["groups"]:
        found.append(f"{record['groups']['issued']:,} groups")
    found += [f"{name.replace('_', ' ')} {_words(record[name])}" for name in record if name not in _TOLD_ELSEWHERE]
    times = record["progress_s"]
    took = "{p50} / {p95} / {max} s".format(**times) if times else ""
    if late := missed(times, row.progress_p95_s):
        took += f"<br>**{late}**" + (f": {row.why_late}" if row.why_late else "")
    machine = f"{record['cores']} cores, {record['seconds']:,.0f} s"
    return f"| {what} | {row.holds} | {'; '.join(found)} | {took} | {machine} |"


def _verdict(record: dict[str, Any]) -> str:
    trials = f"{record['count']:,} trials"
    if record["violations"]:
        first = record["violations"][0].splitlines()[0][:120].replace("|", "/")
        return f"**{len(record['violations'])} violations** in {trials}: {first}"
    return f"0 violations in {trials} (< {record['bound']:.2g} at 95 %)"


def _words(value: Any) -> str:
    """A figure of one fault, for a cell of the table."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    if isinstance(value, int | float):
        return f"{value:,}"
    return str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    main()
