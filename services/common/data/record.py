"""Task records: what a dataset gives, one record per task, by index."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec
from services.common.streams.types import Message

_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task of a dataset.

    Example: TaskRecord((Message("user", "Natalia sold clips to 48 friends …"),), "openai/gsm8k", "72", {"index": 0})
    """

    prompt: tuple[Message, ...]
    data_source: str
    """The verifier is chosen by it."""
    ground_truth: str
    extra_info: dict[str, Any]
    """JSON values only."""


class TaskSource(Protocol):
    """An indexed dataset; equal fingerprints give equal records at every index."""

    @property
    def fingerprint(self) -> str:
        """Digest of the content and of the settings that shape the records."""

    def __len__(self) -> int:
        """Number of tasks, at least 1."""

    def __getitem__(self, index: int) -> TaskRecord:
        """The task at `index`, 0 ≤ index < len; IndexError beyond."""

    def expect(self, indices: Sequence[int]) -> None:
        """Names the tasks that are read next, in their order; it changes how fast they are read, not what they are."""


def prepare(record: TaskRecord, spec: DataSourceSpec) -> TaskRecord:
    """The record with the spec's system prompt, template and data_source applied.

    The spec's system prompt replaces the record's, since chat templates take only one.

    Raises:
        DataError: the spec has a template, but the record has no user message to wrap.
    """
    messages = list(record.prompt)
    if spec.prompt_template is not None:
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise DataError("`prompt` has no user message for prompt_template to wrap")
        last = messages[users[-1]]
        messages[users[-1]] = replace(last, content=spec.prompt_template.replace("{prompt}", last.content))
    if spec.system_prompt is not None:
        others = messages[1:] if messages[0].role == "system" else messages
        messages = [Message("system", spec.system_prompt), *others]
    return replace(record, prompt=tuple(messages), data_source=spec.data_source or record.data_source)


def jsonable(value: object) -> Any:  # noqa: ANN401  any JSON value
    """The nearest JSON value that MessagePack carries too: tuples and sets become lists, keys text, NaN and infinities null.

    Integers beyond 64 bits and other objects become text; half a surrogate pair becomes `?`.
    """
    if isinstance(value, Mapping):
        return {_text(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((jsonable(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # a NumPy scalar or array
        return jsonable(value.tolist())
    return _scalar(value)


def _scalar(value: object) -> str | int | float | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)
    return _text(value)


def _text(value: object) -> str:
    return str(value).encode(errors="replace").decode()
