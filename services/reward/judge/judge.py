"""Judge of a job: asks a language model for a grade of each response.

    group ──► texts, equal ones once ──► cache ── else ──► the job's places ──► the endpoint's ──► answer ──► grade ──► verdict
                                                                                    ▲                │ no score in it
                                                                                    └── once more ◄──┘

What an endpoint does not answer, or not readably, is a failure of the judge and never a reward.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self

from services.common.errors import ConfigError
from services.common.spec.scorers import JudgeSpec
from services.common.streams.types import RolloutGroup, Verdict, VerdictStatus
from services.reward import metrics
from services.reward.judge.answer import UnreadableAnswer, read_grade
from services.reward.judge.cache import digest
from services.reward.judge.endpoint import Endpoint, JudgeError
from services.reward.judge.endpoints import Endpoints
from services.reward.judge.template import request_text
from services.reward.pool.messages import MAX_DETAIL_CHARS, MAX_GROUND_TRUTH_CHARS, clean
from services.reward.scorers.base import failed

READINGS = 2
"""Most answers of one verdict: the second only where the first has no score."""

_Outcome = tuple[float, float, str] | str
"""Reward, accuracy and detail; or the reason of a failure."""


class Judge:
    """One of a job's judges. It starts nothing; its connections are the endpoint's, which outlives it."""

    def __init__(self, name: str, spec: JudgeSpec, endpoints: Endpoints, *, max_chars: int) -> None:
        """`endpoints`: of this server. `max_chars`: of a longer response the end is judged."""
        self._name, self._spec, self._max_chars = name, spec, max_chars
        self._endpoints, self._cache = endpoints, endpoints.cache
        self._places = asyncio.Semaphore(spec.requests_at_once)
        self.queued = 0
        self.progress_at = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    def fault(self) -> str | None:
        """None: an endpoint that is away is no reason to restart this service."""
        return None

    async def score(self, group: RolloutGroup) -> list[Verdict]:
        """One verdict per rollout. FAILED, without a reward, where there is no readable answer within the limit."""
        self.progress_at = time.monotonic()
        texts = [self._text(group, rollout.text) for rollout in group.rollouts]
        async with asyncio.TaskGroup() as tasks:
            grading = {text: tasks.create_task(self._outcome(text)) for text in dict.fromkeys(texts)}
        return [self._verdict(grading[text].result()) for text in texts]

    def _text(self, group: RolloutGroup, response: str) -> str:
        reference = group.task.ground_truth[:MAX_GROUND_TRUTH_CHARS]
        return request_text(self._spec, group.task.prompt, response[-self._max_chars :], reference)

    def _verdict(self, outcome: _Outcome) -> Verdict:
        if isinstance(outcome, str):
            verdict = failed(self._name, outcome)
        else:
            reward, accuracy, detail = outcome
            verdict = Verdict(VerdictStatus.SCORED, reward, accuracy, self._name, clean(detail))
        metrics.observe_verdict(verdict.status, f"judge:{self._spec.endpoint}", verdict.accuracy)
        return verdict

    async def _outcome(self, text: str) -> _Outcome:
        try:
            outcome = await self._grade(text, self._endpoints.named(self._spec.endpoint))
        except (JudgeError, UnreadableAnswer, ConfigError) as error:
            outcome = f"judge endpoint {self._spec.endpoint}: {error}"
        self.progress_at = time.monotonic()
        return outcome

    async def _grade(self, text: str, endpoint: Endpoint) -> _Outcome:
        """The grade of a text. Raises JudgeError without an answer, UnreadableAnswer without a score in it."""
        request = self._request(text, endpoint)
        key = digest(endpoint.name, request)
        if (known := self._cache.get(key)) is not None:
            metrics.JUDGE_CACHE_HITS.labels(endpoint.name).inc()
            return self._read(known)
        self.queued += 1
        try:
            await self._places.acquire()
        finally:
            self.queued -= 1
        try:
            async with endpoint.place():
                answer, outcome = await self._answer(request, endpoint)
        finally:
            self._places.release()
        self._cache.put(key, answer)
        return outcome

    async def _answer(self, request: dict[str, Any], endpoint: Endpoint) -> tuple[str, _Outcome]:
        """An answer with a score, and what it means. Raises as `_grade`, when no answer of READINGS has one."""
        until, reading = time.monotonic() + self._spec.timeout_s, 0
        while True:
            reading += 1
            answer = await endpoint.complete(request, until - time.monotonic())
            try:
                return answer, self._read(answer)
            except UnreadableAnswer:
                metrics.JUDGE_UNREADABLE.labels(endpoint.name).inc()
                if reading == READINGS:
                    raise

    def _request(self, text: str, endpoint: Endpoint) -> dict[str, Any]:
        spec, settings = self._spec, endpoint.settings
        request = {
            "model": spec.model or settings.model,
            "messages": [{"role": "user", "content": text}],
            settings.length_parameter: spec.max_tokens,
        }
        return request if spec.temperature is None else request | {"temperature": spec.temperature}

    def _read(self, answer: str) -> _Outcome:
        grade = read_grade(answer, self._spec)
        ending = " ".join(answer.split())[-MAX_DETAIL_CHARS // 2 :]
        return (
            grade.reward,
            grade.accuracy,
            f"{grade.score:g} of {self._spec.lowest:g} to {self._spec.highest:g}: {ending}",
        )
