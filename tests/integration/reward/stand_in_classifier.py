"""A stand-in for a reward model's process: does what the text of a response says. It needs no torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from services.common.errors import ModelError
from services.common.spec.scorers import RewardModelSpec


class Odd:
    """A row is the response's characters; a score their number, or trouble."""

    def __init__(self, spec: str, _settings: dict[str, Any], _platform: str, _threads: int) -> None:
        path = RewardModelSpec.model_validate_json(spec).path
        if path == "broken":
            raise ModelError("broken: no weights", field="model.path")
        if path == "slow":
            time.sleep(600)

    def encode(self, _prompt: object, texts: Sequence[str]) -> list[tuple[list[int] | None, str]]:
        if "hang in the template" in texts:
            time.sleep(600)
        return [(None, "it refuses") if text == "refused" else ([ord(each) for each in text], "") for text in texts]

    def score(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        texts = ["".join(map(chr, row)) for row in rows]
        for text in texts:
            match text.split(":"):
                case ["hang"]:
                    time.sleep(600)
                case ["stop"]:
                    os.kill(os.getpid(), signal.SIGSTOP)
                case ["die"]:
                    os._exit(1)
                case ["once", path] if not os.path.exists(path):  # noqa: PTH110
                    with open(path, "w"):  # noqa: PTH123
                        os._exit(1)
                case ["raise"]:
                    raise RuntimeError("device-side assert")
                case ["lie"]:
                    return ["high"] * len(rows)
        return [float("nan") if text == "nan" else float(len(text)) for text in texts]
