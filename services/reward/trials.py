"""Trials: groups of no job, judged by a section `reward` that no job uses yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pydantic import ValidationError
from redis.asyncio import Redis

from services.common.errors import EntryError, SandboxError, VerifierError
from services.common.service.lifecycle import Drain, every
from services.common.spec.reward import RewardSpec
from services.common.streams.trial import TrialReply, TrialRequest, answer, take
from services.reward.dispatch import Dispatch

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25


class Trials:
    """This server's answers to trials, one at a time."""

    def __init__(self, commands: Redis, dispatch_of: Callable[[RewardSpec], Dispatch], drain: Drain) -> None:
        """`dispatch_of`: makes a section's scorers, not yet open."""
        self._commands, self._dispatch_of, self._drain = commands, dispatch_of, drain

    async def run(self) -> None:
        """Consumes trials; waits for the next poll; produces a reply for each."""
        await every(POLL_INTERVAL_S, self._drain, self._answer_all)

    async def _answer_all(self) -> None:
        try:
            while (request := await take(self._commands)) is not None:
                await answer(self._commands, request.token, await self._judge(request))
        except EntryError as error:
            log.warning("a trial cannot be judged: %s", error)

    async def _judge(self, request: TrialRequest) -> TrialReply:
        try:
            spec = RewardSpec.model_validate_json(request.reward)
            async with asyncio.timeout(request.limit_s), self._dispatch_of(spec) as dispatch:
                scored = await asyncio.gather(*map(dispatch.judge, request.groups))
        except TimeoutError:
            return TrialReply((), f"no verdicts within {request.limit_s:.3g} s")
        except (ValidationError, SandboxError, VerifierError) as error:
            log.warning("a trial has no verdicts: %s", error)
            return TrialReply((), f"the reward server has no verdicts: {error}")
        return TrialReply(tuple(each.verdicts for each in scored))
