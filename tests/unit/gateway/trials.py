# ruff: noqa: ARG002
"""Checks that children make in the tests of admission."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from services.common.errors import ConfigError, DataError, ModelError


class Good:
    """Finds nothing wrong."""

    def __init__(self, spec: str, settings: dict[str, Any]) -> None:
        assert "path" in spec
        assert "token" not in str(settings)

    def model(self) -> None: ...

    def data(self, section: str, seconds: float) -> list[str]:
        assert 0 < seconds <= 20
        return ["openai/gsm8k", f"of-{section}"]


class Wrong(Good):
    def model(self) -> None:
        raise ModelError("learner.tensor_parallel_size: 4 does not divide 9\nmodel.path: and more: of it")

    def data(self, section: str, seconds: float) -> list[str]:
        if section == "eval":
            raise DataError(f"data.{section}.source: /data/b.jsonl: row 3: `answer` is missing")
        return ["openai/gsm8k", "strange"]


class Endless(Good):
    def data(self, section: str, seconds: float) -> list[str]:
        if section == "train":
            time.sleep(60)
        raise DataError(f"data.{section}.source: /data/b.jsonl: has no rows")


class EndlessModel(Good):
    def model(self) -> None:
        while True:
            pass


class Hungry(Good):
    def model(self) -> None:
        bytearray(64 << 30)

    def data(self, section: str, seconds: float) -> list[str]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return []


class Faulty(Good):
    def model(self) -> None:
        raise ZeroDivisionError


class Unready(Good):
    def __init__(self, spec: str, settings: dict[str, Any]) -> None:
        raise ConfigError("model.path: is not to be looked at")
