"""Procedural tasks' verifier: `reasoning-gym`'s own score of an answer, 0..1. Accuracy is 1 from 0.999 on.

The row's extra_info contains `entry` (of the generator: question, answer, metadata, as JSON values), `task` (its name; by default that in
the data_source or the metadata) and, where it is not the default, the generator's `config`.

The answer is the last `<answer>…</answer>` of the response; else, when the reference is a plain number, the last number of the response;
else the whole response, stripped.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

from services.common.data.reasoning_gym import import_reasoning_gym
from services.common.errors import VerifierError
from services.common.spec.data import PROCEDURAL_PREFIX
from services.reward.verifiers.answers import tagged
from services.reward.verifiers.base import Score
from services.reward.verifiers.decimals import last_number, whole_number

_gym = import_reasoning_gym()

RIGHT = 0.999
"""Scores from here on count as right."""

_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks whose scoring compares grids as tuples: JSON and MessagePack turn these into lists."""


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """The task's own score of the answer. Raises VerifierError when the row has no entry, or the task no numeric score."""
    entry = extra_info.get("entry")
    if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
        raise VerifierError("extra_info.entry is missing: a procedural row carries question, answer and metadata there")
    task = _task(entry, extra_info)
    config = json.dumps(_with_sequences(list, extra_info.get("config") or {}), sort_keys=True)
    answer = answer_text(response, ground_truth)
    plain_entry = _with_sequences(tuple if task in _COMPARES_TUPLES else list, entry)
    score = _dataset(task, config).score_answer(answer, entry=plain_entry)
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise VerifierError(f"task {task} scored {score!r}")
    reward = min(1.0, max(0.0, float(score)))
    return Score(reward, 1.0 if reward >= RIGHT else 0.0, f"{answer[:80]!r} scores {reward:.3g}")


def answer_text(response: str, ground_truth: str) -> str:
    """The answer in a response, by the rule above."""
    if (answer := tagged(response)) is not None:
        return answer
    number = last_number(response) if whole_number(ground_truth) is not None else None
    return response.strip() if number is None else f"{number:f}"


def _task(entry: dict[str, Any], extra_info: dict[str, Any]) -> str:
    data_source = str(extra_info.get("data_source", ""))
    named = data_source.removeprefix(PROCEDURAL_PREFIX) if data_source.startswith(PROCEDURAL_PREFIX) else None
    task = extra_info.get("task") or named or entry["metadata"].get("source_dataset")
    if task not in _gym.factory.DATASETS:
        raise VerifierError(f"reasoning-gym has no task {task!r}")
    return str(task)


@lru_cache(maxsize=64)
def _dataset(task: str, config: str) -> Any:  # noqa: ANN401  reasoning-gym has no types
    return _gym.create_dataset(task, **json.loads(config))


def _with_sequences(kind: type[list[Any] | tuple[Any, ...]], value: Any) -> Any:  # noqa: ANN401  any JSON value
    """The value with every list or tuple in it as this kind."""
    if isinstance(value, list | tuple):
        return kind(_with_sequences(kind, item) for item in value)
    return {key: _with_sequences(kind, item) for key, item in value.items()} if isinstance(value, dict) else value
