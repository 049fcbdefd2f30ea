"""Output: parquet files in the standard columns, the rows that were not taken, and the summary; all or nothing.

Files are written into a temporary folder beside their place and renamed at the end, so that an interrupted run leaves none.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from services.cli.prepare.convert import Converted
from services.common.durable import fsync_directory
from services.common.errors import ConfigError

SPLITS = ("train", "validation")
ROW_GROUP_ROWS = 1024
ROW_GROUP_BYTES = 1024 * 1024
"""A row group ends with the row that exceeds it: the learner unpacks one row group to read one row."""


class Output:
    """The files of one preparation, in a context: complete when it ends, gone when it fails."""

    def __init__(self, prefix: Path, splits: Sequence[str], extra: Sequence[str], *, overwrite: bool) -> None:
        """`splits`: those that are written; `extra`: keys of `extra_info`. Raises ConfigError when the files are there already."""
        self._prefix, self._extra, self._splits = prefix, list(extra), list(splits)
        names = [*(f"{split}.parquet" for split in SPLITS), "rejected.jsonl", "summary.json"]
        self._paths = {name: prefix.with_name(f"{prefix.name}_{name}") for name in names}
        found = [path for path in self._paths.values() if path.exists()]
        if found and not overwrite:
            raise ConfigError(f"{found[0]} is there already: set overwrite to replace it", field="output_prefix")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            name = self._stack.enter_context(
                tempfile.TemporaryDirectory(dir=self._prefix.parent, prefix=f".{self._prefix.name}.")
            )
        except OSError as error:
            raise ConfigError(
                f"{self._prefix.parent} cannot be written: {error.strerror}", field="output_prefix"
            ) from error
        self.folder = Path(name)
        """For temporary files."""
        self._rejected: IO[str] = self._stack.enter_context((self.folder / "rejected.jsonl").open("w"))
        self._writers = {split: _Writer(self.folder / f"{split}.parquet", split, self._extra) for split in self._splits}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self, split: str, file: str, row: Converted) -> None:
        """Writes a task."""
        self._writers[split].add(file, row)

    def reject(self, file: str, number: int, reason: str, detail: str) -> None:
        """Writes that a row was not taken, and why."""
        text = json.dumps({"file": file, "row": number, "reason": reason, "detail": detail}, ensure_ascii=False)
        self._rejected.write(text.encode(errors="replace").decode() + "\n")

    def publish(self, summary: dict[str, Any]) -> dict[str, str]:
        """Completes the files and puts them in their place, the summary last; their paths by name."""
        for writer in self._writers.values():
            writer.close()
        self._rejected.flush()
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        made = {name: path for name, path in self._paths.items() if (self.folder / name).exists()}
        for name in made:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())
        for name, path in self._paths.items():
            if name in made:
                (self.folder / name).replace(path)
            else:
                path.unlink(missing_ok=True)
        fsync_directory(self._prefix.parent)
        return {name: str(path) for name, path in made.items()}


class _Writer:
    """Writer of one parquet file, in small row groups."""

    def __init__(self, path: Path, split: str, extra: list[str]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        text = pa.string()
        fields = [("file", text), ("row", pa.int64()), ("split", text), *((key, text) for key in extra)]
        self._schema = pa.schema(
            [
                ("data_source", text),
                ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
                ("ability", text),
                ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
                ("extra_info", pa.struct(fields)),
            ]
        )
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._split, self._extra, self._rows, self._bytes = split, extra, list[dict[str, Any]](), 0

    def add(self, file: str, row: Converted) -> None:
        """One row, at the end."""
        extra = dict(zip(self._extra, row.extra, strict=True))
        self._rows.append(
            {
                "data_source": row.data_source,
                "prompt": [{"role": role, "content": content} for role, content in row.prompt],
                "ability": row.ability,
                "reward_model": {"style": row.style, "ground_truth": row.ground_truth},
                "extra_info": {"file": file, "row": row.number, "split": self._split, **extra},
            }
        )
        self._bytes += sum(len(content) for _, content in row.prompt) + len(row.ground_truth)
        if len(self._rows) == ROW_GROUP_ROWS or self._bytes > ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Completes the file."""
        if self._rows:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0
