"""Bounds on what is read of a dataset, so that no file and no generator takes more memory than the operator allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgpack

from services.common.config.settings import Settings
from services.common.data.record import TaskRecord
from services.common.errors import DataError
from services.common.streams.limits import MIN_ENTRY_BYTES

MAX_RECORD_BYTES = MIN_ENTRY_BYTES // 2
"""Of a task as MessagePack: one stream entry carries it together with the rollouts that answer it."""
MAX_DATA_SOURCE_CHARS = 256
MAX_TASKS = 100_000_000
"""Of one source: the order of an epoch takes 4 bytes a task."""
MAX_ROW_VALUES = 1_000_000
"""Of a row of a parquet file, whose nulls and booleans take almost no memory until they become Python objects."""


@dataclass(frozen=True, slots=True)
class DataBounds:
    """Bounds that the operator sets (`MILLRACE_MAX_…`)."""

    max_data_bytes: int = 64 * 1024**3
    """Of a file, and of the columns of a parquet file once unpacked."""
    max_row_bytes: int = 8 * 1024**2
    max_prompt_chars: int = 256 * 1024

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The bounds of these settings."""
        return cls(settings.max_data_bytes, settings.max_row_bytes, settings.max_prompt_chars)

    def check(self, record: TaskRecord) -> TaskRecord:
        """The record, if it can be sent to the servers. Raises DataError, which names the part that is too large."""
        chars = sum(len(message.content) for message in record.prompt)
        for part, count in (("prompt", chars), ("ground truth", len(record.ground_truth))):
            if count > self.max_prompt_chars:
                raise DataError(f"the {part} has {count} characters; {_limit('prompt_chars', self.max_prompt_chars)}")
        count = len(record.data_source)
        if count > MAX_DATA_SOURCE_CHARS:
            raise DataError(f"`data_source` has {count} characters; at most {MAX_DATA_SOURCE_CHARS} are taken")
        try:
            size = chars + len(msgpack.packb(record.extra_info))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(f"`extra_info` cannot be sent: {error}") from error
        if size > MAX_RECORD_BYTES:
            raise DataError(f"the prompt and `extra_info` have {size} bytes; at most {MAX_RECORD_BYTES} can be sent")
        return record

    def check_file(self, size: int, verb: str = "has") -> None:
        """Raises DataError for a file that has, or unpacks to, too many bytes."""
        if size > self.max_data_bytes:
            raise DataError(f"{verb} {size} bytes; {_limit('data_bytes', self.max_data_bytes)}")

    def check_row(self, size: int) -> None:
        """Raises DataError for a row of too many bytes."""
        if size > self.max_row_bytes:
            raise DataError(f"has {size} bytes; {_limit('row_bytes', self.max_row_bytes)}")


def _limit(name: str, limit: int) -> str:
    return f"MILLRACE_MAX_{name.upper()}={limit} are taken at the most"
