"""Reward model of a job: a scorer whose numbers come from a process of its own.

    group ──► prompt, responses ── encode ──► rows ──► batches of at most batch_tokens ── score ──► number ──► verdict
                                     └────────── process ─────────────────────────────────┘
                                                    │ limit passed, killed, stopped
                                                    └──► another one, and once more what it was asked

The process begins to load the model when the job is attached and ends with it. Nothing is judged before it is loaded; loading has a limit
of its own and counts against no check. What the process fails at is a failure of the reward model and never a reward.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Self, cast

from services.common.batches import Batches
from services.common.config.settings import Settings
from services.common.errors import SandboxError
from services.common.sandbox.pool import Sandbox
from services.common.spec.scorers import RewardModelSpec, Transform
from services.common.streams.types import RolloutGroup, Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.messages import clean
from services.reward.reward_model.process import ModelProcess
from services.reward.scorers.base import failed

LABEL = "reward_model"
"""Of all reward models, in metrics of verdicts."""
NO_REPLY = "the reward model's process answered with something that is no reply"

_Row = list[int]


class RewardModel:
    """One of a job's reward models."""

    def __init__(
        self, name: str, spec: RewardModelSpec, settings: Settings, sandbox: Sandbox, *, max_chars: int, of: int = 1
    ) -> None:
        """`sandbox`: of this server. `max_chars`: of a longer response the end is judged. `of`: the number of the job's reward models."""
        self._name, self._spec, self._max_chars = name, spec, max_chars
        self._process = ModelProcess(spec, settings, sandbox, of=of)
        self._batches: Batches[_Row, float] = Batches(self._score_rows, size_of=len, most=spec.batch_tokens)
        self.queued = 0
        self.progress_at = time.monotonic()

    async def __aenter__(self) -> Self:
        """Starts to load the model."""
        self._process.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the process."""
        await self._batches.close()
        await self._process.close()

    def fault(self) -> str | None:
        """None: a model that does not work is the job's fault."""
        return None

    @property
    def loading(self) -> bool:
        """Whether its process is loading the model."""
        return self._process.loading

    @property
    def resident_bytes(self) -> int:
        """Memory of its process."""
        return self._process.resident_bytes

    async def score(self, group: RolloutGroup) -> list[Verdict]:
        """One verdict per rollout. FAILED, without a reward, where the model gives no finite number."""
        self.progress_at = time.monotonic()
        try:
            encoded = await self._encoded(group)
        except SandboxError as error:
            encoded = [(None, str(error))] * len(group.rollouts)
        scoring = [asyncio.create_task(self._verdict(row, note)) for row, note in encoded]
        try:
            return await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()  # does nothing to those that are done

    async def _encoded(self, group: RolloutGroup) -> list[tuple[_Row | None, str]]:
        """Row of each response with its prompt, and what is to be said of it; or None and the reason. Raises SandboxError."""
        prompt = [(message.role, message.content) for message in group.task.prompt]
        responses = [clip_end(rollout.text, self._max_chars) for rollout in group.rollouts]
        reply = await self._process.ask("encode", prompt, responses, limit_s=self._spec.timeout_s)
        if not isinstance(reply, list) or len(reply) != len(responses):
            raise SandboxError(NO_REPLY)
        return [_read_row(item, self._spec.max_tokens) for item in reply]

    async def _verdict(self, row: _Row | None, note: str) -> Verdict:
        verdict = failed(self._name, note) if row is None else await self._score(row, note)
        metrics.observe_verdict(verdict.status, LABEL, verdict.accuracy)
        self.progress_at = time.monotonic()
        return verdict

    async def _score(self, row: _Row, note: str) -> Verdict:
        self.queued += 1
        metrics.MODEL_QUEUED.inc()
        try:
            value = await self._batches.run(row)
        except SandboxError as error:
            return failed(self._name, error)
        finally:
            self.queued -= 1
            metrics.MODEL_QUEUED.dec()
        return self._graded(value, note)

    def _graded(self, value: float, note: str) -> Verdict:
        if not math.isfinite(value):
            return failed(self._name, f"the reward model's number is {value}")
        reward = sigmoid(value) if self._spec.transform is Transform.SIGMOID else value
        accuracy = float(reward >= self._spec.right_from)
        detail = f"{value:.6g}, {note}" if note else f"{value:.6g}"
        return Verdict(VerdictStatus.SCORED, reward, accuracy, self._name, clean(detail))

    async def _score_rows(self, rows: Sequence[_Row]) -> list[float]:
        """The model's number for each row. Raises SandboxError."""
        began = time.monotonic()
        values = await self._process.ask("score", list(rows), limit_s=self._spec.timeout_s)
        metrics.MODEL_BATCH_SECONDS.observe(time.monotonic() - began)
        metrics.MODEL_TOKENS.inc(sum(map(len, rows)))
        if (
            not isinstance(values, list)
            or len(values) != len(rows)
            or not all(type(value) is float for value in values)
        ):
            raise SandboxError(NO_REPLY)
        return values


def _read_row(item: object, most_tokens: int) -> tuple[_Row | None, str]:
    """A conversation's part of the process's reply, validated. Raises SandboxError."""
    match item:
        case [None, str(reason)]:
            return None, reason
        case [[*row], str(note)] if 0 < len(row) <= most_tokens and all(isinstance(token, int) for token in row):
            return cast("_Row", row), note
    raise SandboxError(NO_REPLY)


def clip_end(text: str, most_chars: int) -> str:
    """The end of the text, valid UTF-8."""
    return text[-most_chars:].encode("utf-8", "replace").decode()


def sigmoid(value: float) -> float:
    """1 / (1 + e^−x), for any finite x."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
