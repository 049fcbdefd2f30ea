"""Samples: the newest judged groups with their text, for people to read (`GET /jobs/{id}/rollouts`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from services.common.redis import keys
from services.common.streams.types import Message, Rollout, ScoredGroup, Turn, Verdict

MAX_SAMPLES = 256
"""Groups kept for a job."""

PROMPT_CHARS = 8_192
TEXT_CHARS = 8_192
GROUP_CHARS = 65_536
"""Text kept of one group, an equal part of each rollout."""
GROUP_TURNS = 1_024
"""Turns of episodes kept of one group, an equal part of each rollout."""
TURN_MESSAGES = 16
"""Messages kept of one turn."""
PROMPT_IDS = 4_096
GROUP_IDS = 4_096
"""Token ids kept of one group, an equal part of each rollout: with its text, all samples of a job stay within about 30 MB."""

SAMPLES_PER_S = 4.0
"""Groups kept a second, where they come faster for long: nobody reads more, and each costs time. The newest MAX_SAMPLES span a minute."""

_PUSH = """#!lua
-- KEYS: samples   ARGV: sample, how many are kept
if redis.call('LPOS', KEYS[1], ARGV[1]) then return 0 end  -- the first reply was lost, and the command repeated
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, ARGV[2] - 1)
return 1
"""


class SampleBudget:
    """Right to keep samples: as many as are kept at once, and SAMPLES_PER_S more each second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, for tests."""
        self._clock, self._left, self._at = clock, float(MAX_SAMPLES), clock()

    def take(self) -> bool:
        """Whether one more sample may be kept now."""
        now = self._clock()
        self._left, self._at = min(float(MAX_SAMPLES), self._left + SAMPLES_PER_S * (now - self._at)), now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


async def keep_sample(redis: Redis, scored: ScoredGroup) -> None:
    """Adds the group to the job's samples and removes the oldest."""
    key = keys.samples(scored.group.task.job_id)
    await redis.register_script(_PUSH)(keys=[key], args=[json.dumps(sample(scored), ensure_ascii=False), MAX_SAMPLES])


def sample(scored: ScoredGroup) -> dict[str, Any]:
    """The group as JSON values (`SampleRecord`), long texts cut in the middle; of too many turns, messages and token ids the last ones."""
    task, count = scored.group.task, max(1, len(scored.group.rollouts))
    text_chars, ids = min(TEXT_CHARS, GROUP_CHARS // count), GROUP_IDS // count
    played = task.environment
    about = {} if played is None else {"environment": played.name, "environment_seed": played.seed}
    judged = zip(scored.group.rollouts, scored.verdicts, strict=True)
    return {
        "group_id": task.group_id, "lineage": task.lineage, "attempt": task.attempt, "purpose": task.purpose,
        "prompt": shorten(_prompt(_first_messages(scored)), PROMPT_CHARS), "ground_truth": shorten(task.ground_truth, PROMPT_CHARS),
        "data_source": task.data_source, **about,
        "rollouts": [_rollout(rollout, verdict, text_chars, ids, GROUP_TURNS // count) for rollout, verdict in judged],
        "prompt_tokens": len(scored.group.prompt_tokens), "prompt_token_ids": scored.group.prompt_tokens[-PROMPT_IDS:].tolist(),
        "server": scored.group.server, "at": time.time(),
    }  # fmt: skip


def shorten(text: str, limit: int) -> str:
    """The text, or its beginning and its end when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[len(text) - half :]}"


def _first_messages(scored: ScoredGroup) -> tuple[Message, ...]:
    """The task's prompt; with an environment its first messages, with which all episodes of the group begin."""
    task = scored.group.task
    episodes = (rollout.turns for rollout in scored.group.rollouts if rollout.turns)
    return task.prompt if task.environment is None else next((turns[0].said for turns in episodes), ())


def _prompt(messages: tuple[Message, ...]) -> str:
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def _rollout(rollout: Rollout, verdict: Verdict, text_chars: int, ids: int, turns: int) -> dict[str, Any]:
    kept = list(enumerate(rollout.turns, 1))[max(0, len(rollout.turns) - turns) :]
    replies = [turn.text for _, turn in kept]
    said = [message.content for _, turn in kept for message in turn.said[-TURN_MESSAGES:]]
    chars = _longest([len(text) for text in (rollout.text, *replies, *said)], text_chars)
    shown = {"turns": [_turn(turn, number, chars) for number, turn in kept]} if rollout.turns else {}
    return {
        "text": shorten(rollout.text, chars), "reward": verdict.reward, "accuracy": verdict.accuracy, "status": verdict.status,
        "verifier": verdict.verifier, "detail": verdict.detail, "finish_reason": rollout.finish_reason,
        "min_policy_version": rollout.min_policy_version, "max_policy_version": rollout.max_policy_version,
        "tokens": len(rollout.tokens), **shown, "token_ids": rollout.tokens[-ids:].tolist(),
    }  # fmt: skip


def _turn(turn: Turn, number: int, chars: int) -> dict[str, Any]:
    said = [
        {"role": message.role, "content": shorten(message.content, chars)} for message in turn.said[-TURN_MESSAGES:]
    ]
    return {
        "turn": number, "said": said, "text": shorten(turn.text, chars), "observed": turn.observed, "sampled": turn.sampled,
        "finish_reason": turn.finish_reason, "reward": turn.reward,
    }  # fmt: skip


def _longest(lengths: Sequence[int], room: int) -> int:
    """Most characters of one text, so that texts of these lengths have at most `room` together: only the longest ones are cut."""
    left = sorted(lengths)
    while left and left[0] <= room // len(left):
        room -= left.pop(0)
    return room // len(left) if left else max(lengths)
