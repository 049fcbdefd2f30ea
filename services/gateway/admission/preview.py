"""Preview of a job's prompts: as the model will see them, and their lengths against the context. It runs in a child process.

tasks ──► chat template ──► text ──► token ids ──► lengths; the first few are shown
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Literal, TypedDict

from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.data.procedural import ProceduralSource
from services.common.data.record import TaskRecord
from services.common.data.source import data_roots, open_within
from services.common.errors import PromptError
from services.common.models.directory import inspect_model
from services.common.models.prompts import CHARACTERS_PER_TOKEN, PromptEncoder
from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec

SHOWN = 3
"""Prompts that are shown, the first of the source."""
OPENING_SHARE = 0.3
"""Of the time, for opening the source: the lines of a large jsonl file are looked for as long."""
MOST_PROCEDURAL = 1000
"""Tasks of a procedural source that are made and counted."""


class ShownTask(TypedDict):
    """A task that is shown, as MessagePack values."""

    index: int
    text: str
    """The prompt as the chat template writes it, special tokens included; empty where it was refused."""
    tokens: int
    prompt: list[tuple[Literal["system", "user", "assistant", "tool"], str]]
    """Role and content of each message."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, object]


class Preview(TypedDict):
    """Prompts of one section, as MessagePack values."""

    tasks: int
    """Of the source."""
    counted: int
    """Those whose prompts were counted in the time, the first of the source."""
    shortest: int
    """Tokens, as the following two; 0 where no prompt was counted."""
    median: int
    longest: int
    room: int
    """Tokens that the context leaves a prompt beside a response of full length."""
    too_long: int
    """Counted prompts that have more: they are left out (`filtered`), or their groups fail."""
    filtered: bool
    refused: int
    """Counted prompts that the template or the tokenizer refuses."""
    refusal: str
    """Why, for the first of them."""
    shown: list[ShownTask]


def preview(spec: JobSpec, settings: Settings, model_dir: Path, section: str, until: float) -> Preview:
    """The prompts of `data.<section>`, as many as can be counted until then, monotonic seconds. Raises ConfigError as admission does."""
    source: DataSourceSpec = getattr(spec.data, section)
    context = spec.model.max_model_len or inspect_model(model_dir).max_position_embeddings
    encoder = PromptEncoder(model_dir, spec.model.chat_template)
    opened = time.monotonic() + (until - time.monotonic()) * OPENING_SHARE
    bounds, roots = DataBounds.of(settings), data_roots(settings)
    tasks = open_within(source, roots, bounds, field=f"data.{section}", until=opened, whole=False)
    count = min(len(tasks), MOST_PROCEDURAL) if isinstance(tasks, ProceduralSource) else len(tasks)
    lengths: list[int] = []
    shown: list[ShownTask] = []
    refusals: list[str] = []
    for index in range(count):
        tasks.expect(range(index, count))
        record, text, tokens = tasks[index], "", 0
        try:
            text = encoder.render(
                [(message.role, message.content) for message in record.prompt], CHARACTERS_PER_TOKEN * context
            )
            tokens = len(encoder.token_ids(text))
            lengths.append(tokens)
        except PromptError as error:
            refusals.append(str(error))
        if index < SHOWN:
            shown.append(_shown(index, record, text, tokens))
        elif time.monotonic() > until:
            break
    room = context - spec.rollout.rollout_max_tokens
    return Preview(
        tasks=len(tasks),
        counted=len(lengths) + len(refusals),
        shortest=min(lengths, default=0),
        median=round(statistics.median(lengths)) if lengths else 0,
        longest=max(lengths, default=0),
        room=room,
        too_long=sum(length > room for length in lengths),
        filtered=spec.data.filter_overlong_prompts,
        refused=len(refusals),
        refusal=next(iter(refusals), ""),
        shown=shown,
    )


def _shown(index: int, record: TaskRecord, text: str, tokens: int) -> ShownTask:
    return ShownTask(
        index=index,
        text=text,
        tokens=tokens,
        prompt=[(message.role, message.content) for message in record.prompt],
        data_source=record.data_source,
        ground_truth=record.ground_truth,
        extra_info=record.extra_info,
    )
