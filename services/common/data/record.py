"""What a dataset gives: one record per task, by index."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.common.errors import DataError
from services.common.spec.data import DataSourceSpec
from services.common.streams.types import Message


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task of a dataset.

    Example: TaskRecord((Message("user", "Natalia sold clips to 48 friends …"),), "openai/gsm8k", "72", {"index": 0})
    """

    prompt: tuple[Message, ...]
    data_source: str
    """What the verifier is chosen by."""
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


def prepare(record: TaskRecord, spec: DataSourceSpec) -> TaskRecord:
    """The record with the spec's system prompt, template and data_source applied.

    A system prompt takes the place of the record's own, since chat templates take only one.

    Raises:
        DataError: there is a template, but no user message that it could wrap.
    """
    messages = list(record.prompt)
    if spec.prompt_template is not None:
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise DataError("`prompt` has no user message for prompt_template to wrap")
        last = messages[users[-1]]
        messages[users[-1]] = replace(last, content=spec.prompt_template.replace("{prompt}", last.content))
    if spec.system_prompt is not None:
        own = messages[0].role == "system"
        messages = [Message("system", spec.system_prompt), *messages[own:]]
    return replace(record, prompt=tuple(messages), data_source=spec.data_source or record.data_source)
