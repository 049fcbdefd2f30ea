"""A hostile job in the making: its spec, and the model and the files that it names. Bad parts change it, one after the other."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from tests.chaos.job import MODEL, job_spec

STEPS = 2
MAX_BYTES = 64 * 1024**2
"""What another part has made larger is not changed any more."""
JSON_TYPE, YAML_TYPE = "application/json", "application/yaml"


class Expected(IntEnum):
    """How a hostile job may end; of several bad parts the strictest counts."""

    HARMLESS = 0
    """Odd, but perhaps usable: it may also succeed."""
    ENDS = 1
    """It is refused, or fails, and says why."""
    REFUSED = 2
    """It is refused at submission."""


@dataclass(slots=True)
class Draft:
    """One hostile job; without any bad part it would train STEPS steps."""

    home: Path
    """Of the stack."""
    name: str
    """`hostile-17`: of the job, and of its model and files."""
    spec: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    """Sent in place of the spec."""
    media_type: str = JSON_TYPE
    expected: Expected = Expected.HARMLESS
    untrue: str = ""
    """Words that a refusal must not have, for they would be wrong; none when empty."""
    endless: bool = False
    """It would train for ever, rightly: it is cancelled after a while."""

    def __post_init__(self) -> None:
        """Begins with a good spec."""
        if not self.spec:
            self.spec = job_spec(steps=STEPS) | {"name": self.name}
            self.spec["rollout"] |= {"group_timeout_s": 10.0, "max_attempts": 2, "max_concurrent_groups": 16}
            self.spec["reward"] = {"timeout_s": 1.0}
            self.spec["algorithm"] = {"filter_groups_train_batch_size": 4, "filter_groups_max_batches": 4}

    def expect(self, expected: Expected) -> None:
        """Such an end is asked for, or the stricter one that was before."""
        self.expected = max(self.expected, expected)

    def model(self) -> Path:
        """A copy of the good model that this job names as its own."""
        folder = self.home / "models" / self.name
        if not folder.exists():
            shutil.copytree(self.home / "models" / MODEL, folder)
        self.set("model.path", self.name)
        return folder

    def read(self, name: str) -> bytes:
        """A file of the model; empty when another part has made something else of it."""
        path = self.model() / name
        return path.read_bytes() if path.is_file() and path.stat().st_size < MAX_BYTES else b""

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file of the model."""
        path = self.model() / name
        if not path.is_dir():
            path.unlink(missing_ok=True)
            path.write_bytes(content)

    def change_json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes a JSON file of the model; does nothing where another part has left no JSON."""
        try:
            document = json.loads(self.read(name))
            change(document)
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        self.write(name, json.dumps(document).encode())

    def data(self, suffix: str = ".jsonl") -> Path:
        """The file of tasks that this job names as its own; not there yet."""
        self.set("data.train", {"source": f"{self.name}{suffix}"})
        return self.home / "data" / f"{self.name}{suffix}"

    def set(self, path: str, value: object) -> None:
        """Puts a value into the spec: `learner.steps`."""
        *sections, key = path.split(".")
        section = self.spec
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):  # another part has made something else of it
                return
        section[key] = value

    def clear(self) -> None:
        """Removes its model and its files."""
        shutil.rmtree(self.home / "models" / self.name, ignore_errors=True)
        for path in (self.home / "data").glob(f"{self.name}.*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


Part = Callable[[Draft, random.Random], None]
Parts = Mapping[str, Part]


def a_pipe(name: str) -> Part:
    """A pipe in the place of a file of the model: whoever opens it to read waits for ever."""

    def part(draft: Draft, _: random.Random) -> None:
        path = draft.model() / name
        path.unlink()
        os.mkfifo(path)
        draft.expect(Expected.REFUSED)

    return part
