"""Sources of a job's tasks, in the child process that reads them and can be killed at any time (see `services.learner.groups.data`).

spec ──► Sources ──► index of a draw's task ──► records, as MessagePack
"""

from __future__ import annotations

import hashlib
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import islice
from typing import Any

import msgpack

from services.common.config.settings import Settings
from services.common.data.environments import ENVIRONMENT
from services.common.data.order import next_indices, task_index
from services.common.data.record import TaskRecord, TaskSource
from services.common.data.source import open_source
from services.common.errors import ConfigError, DataError
from services.common.spec.base import RECORDED
from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec
from services.common.streams.types import Message

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 8 * 1024 * 1024
"""A reply ends with the record that exceeds it."""
MAX_COMPARED = 200_000
"""Training tasks that held-out tasks are compared with; for a larger source, the log reports the limit."""
REASON_CHARS = 300
CHECK_S = 60.0
"""Time in which a file's rows are checked when it is opened; those that remain are checked when they are read."""
LOOKAHEAD = 65_536
"""Draws whose tasks a source is told to expect."""

Made = tuple[int, bytes | None, str]
"""A task's index in its source, its record as MessagePack, and the reason if there is none; on the wire a list."""


class Sources:
    """The training source and the held-out source, each opened at its first use."""

    def __init__(self, spec: str, settings: dict[str, Any], check_s: float = CHECK_S) -> None:
        """`spec`: of the job, as JSON; `settings`: from `Settings.public`; `check_s`: time in which a file's rows are checked."""
        self.spec = JobSpec.model_validate_json(spec, context=RECORDED)
        self.settings, self._check_s = Settings(**settings), check_s
        self._held_out: list[int] = []

    @cached_property
    def train(self) -> TaskSource:
        """The training source."""
        return self._open(self.spec.data.train, "data.train")

    @cached_property
    def eval(self) -> TaskSource:
        """The held-out source."""
        if self.spec.data.eval is None:
            raise DataError("the job has no held-out tasks", field="data.eval")
        return self._open(self.spec.data.eval, "data.eval")

    def _open(self, source: DataSourceSpec, field: str) -> TaskSource:
        opened = open_source(source, self.settings, field=field, until=time.monotonic() + self._check_s)
        if not self.spec.data.filter_overlong_prompts or source.environment is not None:
            return opened
        from services.learner.groups.fitting import fitting

        return fitting(opened, self.spec, self.settings, field=field)

    def check_model(self) -> None:
        """Raises ModelError if a model's files are not complete and safe, or its sizes do not fit the job's; every role's."""
        from services.common.models.directory import check_parallel_sizes, inspect_model, resolve_model
        from services.common.models.roles import check_role, named_models, naming

        actor = inspect_model(resolve_model(self.spec.model.path, self.settings))
        check_parallel_sizes(actor, self.spec)
        for role, path in named_models(self.spec).items():
            with naming(f"{role}.path"):
                check_role(role, inspect_model(resolve_model(path, self.settings)), actor, self.spec)

    def open_train(self) -> dict[str, Any]:
        """Size and fingerprint of the training source."""
        return {"tasks": len(self.train), "fingerprint": self.train.fingerprint}

    def open_eval(self) -> int:
        """Size of the held-out source."""
        return len(self.eval)

    def held_out(self) -> list[int]:
        """Rows of the held-out source that are evaluated."""
        self._held_out = held_out_rows(self.eval, self.train, self.spec.eval.tasks)
        return self._held_out

    def index(self, ordinal: int) -> int:
        """Index in the training source of the `ordinal`-th draw's task."""
        data = self.spec.data
        return task_index(data.seed, ordinal, len(self.train), data.shuffle)

    def training(self, ordinals: list[int], seconds: float) -> list[Made]:
        """Tasks of these draws: as many as are made within `seconds` and fit into one reply, and at least the first."""
        data = self.spec.data
        self.train.expect(next_indices(data.seed, ordinals[0], len(self.train), data.shuffle, LOOKAHEAD))
        return _make("data.train", self.train, map(self.index, ordinals), seconds)

    def evaluation(self, rows: list[int], seconds: float) -> list[Made]:
        """The same for rows of the held-out source."""
        self.eval.expect(self._held_out[bisect_left(self._held_out, rows[0]) :] or rows)
        return _make("data.eval", self.eval, rows, seconds)


def _make(field: str, source: TaskSource, indices: Iterable[int], seconds: float) -> list[Made]:
    deadline, made, size = time.monotonic() + seconds, [], 0
    for index in indices:
        payload, reason = _record(field, index, lambda at=index: source[at])  # type: ignore[misc]
        made.append((index, payload, reason))
        size += len(payload or b"")
        if time.monotonic() > deadline or size > MAX_REPLY_BYTES:
            break
    return made


def _record(field: str, index: int, make: Callable[[], TaskRecord]) -> tuple[bytes | None, str]:
    try:
        return pack(make()), ""
    except ConfigError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  foreign code, or a lack of memory: only this task is lost
        message = " ".join(str(error).split())[:REASON_CHARS]
        return None, f"{field}: task {index}: {type(error).__name__}: {message}"


def pack(record: TaskRecord) -> bytes:
    """The record as MessagePack; ValueError, TypeError or OverflowError if that cannot encode a value of `extra_info`."""
    prompt = [[message.role, message.content] for message in record.prompt]
    fields = [prompt, record.data_source, record.ground_truth, record.extra_info]
    return bytes(msgpack.packb(fields, unicode_errors="surrogatepass"))


def unpack(payload: bytes) -> TaskRecord:
    """Inverse of `pack`."""
    fields = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    prompt, data_source, ground_truth, extra_info = fields
    return TaskRecord(tuple(Message(*message) for message in prompt), data_source, ground_truth, extra_info)


def held_out_rows(source: TaskSource, train: TaskSource, tasks: int) -> list[int]:
    """The first `tasks` rows of the held-out source whose prompts are in no training task; DataError if there is none."""
    compared = min(len(train), MAX_COMPARED)
    if compared < len(train):
        log.warning("held-out tasks are compared with the first %d of %d training tasks only", compared, len(train))
    known = {_digest(train[index]) for index in range(compared)}
    rows = list(islice((row for row in range(len(source)) if _digest(source[row]) not in known), tasks))
    if not rows:
        raise DataError("every one of its tasks is a training task too: nothing is held out", field="data.eval")
    return rows


def _digest(record: TaskRecord) -> bytes:
    """Of the prompt, or of the episode that it begins; 16 bytes: 200,000 of them take less memory than the prompts."""
    parts: list[Any] = [part for message in record.prompt for part in (message.role, message.content)]
    parts += [record.extra_info.get(ENVIRONMENT)] if not record.prompt else []
    return hashlib.blake2b(msgpack.packb(parts, unicode_errors="surrogatepass"), digest_size=16).digest()
