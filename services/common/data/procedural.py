"""Procedural sources: `reasoning-gym` makes each task from a seed and an index when it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

from services.common.data.bounds import DataBounds
from services.common.data.reasoning_gym import import_reasoning_gym
from services.common.data.record import TaskRecord, jsonable, prepare
from services.common.errors import DataError, did_you_mean
from services.common.spec.data import DataSourceSpec
from services.common.streams.types import Message

DEFAULT_SIZE = 10_000
CACHED_TASKS = 4096
MAX_SETTINGS = 1000
"""Values of `config`, nested ones included."""
MAX_SETTING_CHARS = 1024
MAX_SETTING_DEPTH = 8
_SPEC_FIELDS = ("seed", "size")
"""Settings of every task that are fields of the spec."""
_INT64 = 2**63


class ProceduralSource:
    """The tasks of one `reasoning_gym:<task>` source.

    `extra_info` has what a verifier needs to score an answer: `task`, `config` (with seed and size), `index`, and the `entry` as JSON.
    The task made again from config and index has exactly the same entry.
    """

    def __init__(self, spec: DataSourceSpec, *, field: str, bounds: DataBounds) -> None:
        """Makes the first task, as a check of the settings. Its time and memory have no limit: run it where it can be killed.

        Raises:
            DataError: an unknown task or setting, with near matches, or a setting that the task rejects; names the field.
        """
        self._spec, self._field, self._bounds = spec, field, bounds
        self._task = spec.procedural_task or ""
        self._size = spec.size or DEFAULT_SIZE
        self._check_keys()
        self._check_values()
        self._config = {**spec.config, "seed": self.first_seed(spec.seed, self._size), "size": self._size}
        self._cached = lru_cache(maxsize=CACHED_TASKS)(self._make)
        try:
            self._dataset = import_reasoning_gym().create_dataset(self._task, **self._config)
        except Exception as error:  # noqa: BLE001  its settings cause whatever a generator raises, also a lack of memory
            self._reject_settings(error)
        self._cached(0)
        version = importlib.metadata.version("reasoning-gym")
        self.fingerprint = hashlib.blake2b(f"{version} {spec.model_dump_json()}".encode(), digest_size=16).hexdigest()

    @staticmethod
    def first_seed(seed: int, size: int) -> int:
        """The generator's seed for a spec's seed.

        Task i of a source is made from its seed + i, so sources with seeds 0 and 1 would share all tasks but one. This hash spreads the
        seeds over those that the generators take (below 2³²).
        """
        return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest()) % (2**32 - size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> TaskRecord:
        if not 0 <= index < self._size:
            raise IndexError(f"task {index} of a source of {self._size}")
        return self._cached(index)

    def expect(self, indices: Sequence[int]) -> None:
        """Does nothing: a task is made alone."""

    def _make(self, index: int) -> TaskRecord:
        try:
            entry = self._dataset[index]
            answer = entry["answer"]
            record = TaskRecord(
                prompt=(Message("user", str(entry["question"])),),
                data_source=self._spec.source,
                ground_truth="" if answer is None else str(answer),  # None: any answer that meets the rules is right
                extra_info={"task": self._task, "config": self._config, "index": index, "entry": jsonable(entry)},
            )
            return self._bounds.check(prepare(record, self._spec))
        except DataError as error:
            self._reject("config", f"task {index} of {self._task}: {error}")
        except Exception as error:  # noqa: BLE001
            self._reject_settings(error)

    def _check_keys(self) -> None:
        try:
            known_tasks = import_reasoning_gym().factory.DATASETS
        except ImportError:
            hint = "install it with `pip install 'millrace[reward]'`"
            self._reject("source", f"procedural tasks need the package reasoning-gym; {hint}")
        if self._task not in known_tasks:
            self._reject("source", f"reasoning-gym has no task {self._task!r}{did_you_mean(self._task, known_tasks)}")
        known = [item.name for item in dataclasses.fields(known_tasks[self._task][1])]
        for key in self._spec.config:
            if key in _SPEC_FIELDS:
                self._reject("config", f"{key!r} is set by {self._field}.{key}, not in config")
            if key not in known:
                free = [name for name in known if name not in _SPEC_FIELDS]
                hint = did_you_mean(key, free)
                self._reject("config", f"{self._task} has no setting {key!r}{hint} (settings: {', '.join(free)})")

    def _check_values(self) -> None:
        """Bounds the settings; those that matter to the generators are numbers and short texts."""
        count, pending = 0, [(name, value, 1) for name, value in self._spec.config.items()]
        while pending:
            name, value, depth = pending.pop()
            count += 1
            if isinstance(value, dict | list):
                items = [*value, *value.values()] if isinstance(value, dict) else value
                pending.extend((name, item, depth + 1) for item in items[: MAX_SETTINGS + 1])
            if count + len(pending) > MAX_SETTINGS:
                self._reject("config", f"{name!r} has more values than the {MAX_SETTINGS} that all settings may have")
            if depth > MAX_SETTING_DEPTH:
                self._reject("config", f"{name!r} is nested more than {MAX_SETTING_DEPTH} deep")
            if isinstance(value, int) and not -_INT64 <= value < _INT64:
                self._reject("config", f"{name!r} is an integer of more than 64 bits")
            if isinstance(value, float) and not math.isfinite(value):
                self._reject("config", f"{name!r} is {value}")
            if isinstance(value, str) and len(value) > MAX_SETTING_CHARS:
                limit = f"at most {MAX_SETTING_CHARS} are taken"
                self._reject("config", f"{name!r} is a text of {len(value)} characters; {limit}")

    def _reject_settings(self, error: Exception) -> NoReturn:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        settings = json.dumps(self._spec.config, default=str)[:300]
        self._reject("config", f"{self._task} refuses {settings}: {reason}")

    def _reject(self, name: str, reason: str) -> NoReturn:
        raise DataError(reason, field=f"{self._field}.{name}")
