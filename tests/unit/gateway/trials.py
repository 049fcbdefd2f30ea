# ruff: noqa: ARG002
"""Checks that children make in the tests of admission."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from typing import Any

from services.common.checkpoints.manifest import CheckpointRefused
from services.common.errors import ConfigError, DataError, ModelError, Problem
from services.common.models.directory import ModelInfo


def facts(*names: str, all_checked: bool = True) -> dict[str, Any]:
    return {"tasks": 3, "checked": 3, "all_checked": all_checked, "data_sources": list(names)}


class Good:
    """Finds nothing wrong."""

    def __init__(self, spec: str, settings: dict[str, Any]) -> None:
        assert "path" in spec
        assert "token" not in str(settings)

    def model(self, seconds: float) -> dict[str, Any] | None:
        shape = asdict(ModelInfo("LlamaForCausalLM", 2, 4, 2, 32, 48, 96, 1024, tie_word_embeddings=True))
        return {"shape": shape, "parameters": 10_000}

    def role(self, role: str, seconds: float) -> dict[str, Any]:
        assert 0 < seconds <= 20
        return {"shape": {}, "parameters": 10_000}

    def reward_model(self, name: str, seconds: float) -> None:
        assert 0 < seconds <= 20

    def load(self, seconds: float) -> dict[str, Any] | None:
        return {"path": "/jobs/other", "step": 3}

    def data(self, section: str, seconds: float) -> dict[str, Any]:
        assert 0 < seconds <= 20
        return facts("openai/gsm8k", f"of-{section}")


class Wrong(Good):
    def model(self, seconds: float) -> dict[str, Any] | None:
        raise ModelError(Problem("learner.tensor_parallel_size", "4 does not divide 9"), "and more: of it")

    def reward_model(self, name: str, seconds: float) -> None:
        raise ModelError(f"{name} has 2 labels", field=f"reward.reward_models.{name}.path")

    def data(self, section: str, seconds: float) -> dict[str, Any]:
        if section == "eval":
            raise DataError("/data/b.jsonl: row 3: `answer` is missing", field=f"data.{section}.source")
        return facts("openai/gsm8k", "strange")


class Endless(Good):
    def data(self, section: str, seconds: float) -> dict[str, Any]:
        if section == "train":
            time.sleep(60)
        raise DataError("/data/b.jsonl: has no rows", field=f"data.{section}.source")


class EndlessModel(Good):
    def model(self, seconds: float) -> dict[str, Any] | None:
        while True:
            pass


class Hungry(Good):
    def model(self, seconds: float) -> dict[str, Any] | None:
        return {"size": len(bytearray(64 << 30))}

    def data(self, section: str, seconds: float) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return facts()


class Faulty(Good):
    def model(self, seconds: float) -> dict[str, Any] | None:
        raise ZeroDivisionError


class Killed(Good):
    def model(self, seconds: float) -> dict[str, Any] | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class Unready(Good):
    def __init__(self, spec: str, settings: dict[str, Any]) -> None:
        raise ConfigError("is not to be looked at", field="model.path")


class Half(Good):
    def data(self, section: str, seconds: float) -> dict[str, Any]:
        return facts("openai/gsm8k", all_checked=section == "eval")


class Misled(Good):
    def load(self, seconds: float) -> dict[str, Any] | None:
        raise CheckpointRefused("/jobs/other: was made of another model", field="checkpoint.load")


class Unloaded(Good):
    def load(self, seconds: float) -> dict[str, Any] | None:
        return None


class Roles(Good):
    """A critic that needs more memory than any machine has, and a reference that is not a model."""

    def role(self, role: str, seconds: float) -> dict[str, Any]:
        if role == "reference":
            raise ModelError("there is no model 'b'", field="reference.path")
        return {"shape": {}, "parameters": 10**15}


class EndlessRole(Good):
    def role(self, role: str, seconds: float) -> dict[str, Any]:
        time.sleep(60)
        return {}
