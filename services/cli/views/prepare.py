"""Progress and summary of a preparation of data."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class PrepareProgress:
    """A progress bar on a terminal; elsewhere a line every `interval` rows."""

    def __init__(self, console: Console, interval: int) -> None:
        self._console, self._interval, self._said, self._began = console, interval, 0, time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("0 rows", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, rows: int, done: int, size: int) -> None:
        """Shows how much was read: rows, and bytes of the input."""
        self._progress.update(self._task, description=f"{rows:,} rows", completed=done, total=size)
        if not self._console.is_terminal and rows // self._interval > self._said:
            self._said = rows // self._interval
            speed = rows / max(1e-9, time.monotonic() - self._began)
            self._console.print(f"{rows:,} rows ({done / max(1, size):.0%}), {speed:,.0f} rows/s")


def print_prepared(console: Console, summary: dict[str, Any]) -> None:
    """The summary as text."""
    taken, rejected = summary["taken"], summary["rejected"]
    console.print(f"{summary['rows']:,} rows: " + ", ".join(f"{count:,} {split}" for split, count in taken.items()))
    console.print("not taken: " + ", ".join(f"{count:,} {reason}" for reason, count in rejected.items()))
    if other := summary["duplicates_with_another_answer"]:
        console.print(f"duplicates with another answer than the first: {other:,}")
    for unit in ("tokens", "characters"):
        if lengths := summary.get(f"prompt_{unit}"):
            console.print(f"{unit} of a prompt: " + ", ".join(f"{name} {value:,}" for name, value in lengths.items()))
    console.print("data_source: " + ", ".join(f"{name} {count:,}" for name, count in summary["data_sources"].items()))
    for found in summary["examples"].values():
        for line in found:
            console.print(f"  {line}", markup=False)
    for path in summary["files"].values():
        console.print(path, markup=False, soft_wrap=True)
