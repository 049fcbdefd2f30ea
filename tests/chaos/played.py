"""What must hold of a trained group of episodes: each can be played again, turn by turn, and nothing of it is another's.

prompt ─► turn: tokens of the version's weights ─► the world's answer to them ─► observed tokens ─► turn ─► … ─► the world's reward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.common.data.environments import EnvironmentSource
from services.common.data.order import task_index
from services.common.spec.job import JobSpec
from services.common.streams.types import EnvironmentCall, Message, Rollout, ScoredGroup, Verdict
from services.environment.base import Observation
from tests.chaos.scripted import lifelike, script
from tests.chaos.worlds import world

MarkOf = Callable[[int], bytes | None]
"""Version → the fingerprint of its weights; None of one that nothing tells."""


def troubles(scored: ScoredGroup, spec: JobSpec, mark_of: MarkOf) -> Iterator[str]:
    """What is wrong with the group."""
    task = scored.group.task
    source = EnvironmentSource(spec.data.train)
    seed = task_index(spec.data.seed, task.group_id, len(source), spec.data.shuffle)
    expected = source[seed].extra_info["environment"]["seed"]
    call, prompt = task.environment, scored.group.prompt_tokens.tolist()
    if call is None or call.seed != expected or prompt != script.encode(_said(world.first(expected))):
        yield f"is not the episode of seed {expected}"
        return
    if call.config.get("hostile") and (plan := world.plan_of(call.seed)) is not None and plan.strikes(0):
        yield f"is trained, and its world does wrong at once: {plan.deed}"
    index = 0
    for number, (rollout, verdict) in enumerate(zip(scored.group.rollouts, scored.verdicts, strict=True)):
        marks = [mark_of(version) for version in rollout.token_versions.tolist()]
        sampled = rollout.turns[0].sampled if rollout.turns else 0
        while index < script.GROUP_SIZE and _differs(rollout, marks, 0, sampled, call.seed, index):
            index += 1  # the episodes before it failed
        if index == script.GROUP_SIZE:
            yield f"the first turn of rollout {number} is not of its versions' weights"
            return
        index += 1
        yield from (f"rollout {number}: {trouble}" for trouble in _replayed(rollout, verdict, marks, call, prompt))


def _replayed(
    rollout: Rollout, verdict: Verdict, marks: list[bytes | None], call: EnvironmentCall, prompt: list[int]
) -> Iterator[str]:
    """What differs when the episode is played again."""
    tokens, at, observed = rollout.tokens.tolist(), 0, list[int]()
    plan = world.plan_of(call.seed) if call.config.get("hostile") else None
    for number, turn in enumerate(rollout.turns, start=1):
        begin, end = at + turn.observed, at + turn.observed + turn.sampled
        if tokens[at:begin] != observed:
            yield f"before turn {number} it observed what the world did not say"
            return
        row = lifelike.row_of([*prompt, *tokens[:begin]])
        if number > 1 and _differs(rollout, marks, begin, end, row, 0):
            yield f"turn {number} is not of its versions' weights"
            return
        reply, at = script.text(tokens[begin:end]), end
        if plan is not None and plan.strikes(number, reply):
            yield f"has a verdict, and its world did wrong at turn {number}: {plan.deed}"
            return
        said = world.answer(call.seed, number, reply)
        observed = script.bridge(_said(said))
        if said.done is not (number == len(rollout.turns)):
            yield f"is {'not ' if number < len(rollout.turns) else ''}over after turn {number}"
            return
    if (verdict.reward, verdict.accuracy) != (said.reward, said.accuracy):
        yield f"has reward {verdict.reward}, and the world said {said.reward}"


def _said(observation: Observation) -> list[Message]:
    """As the rollout service has it."""
    return [Message(message.role, message.content) for message in observation.messages]


def _differs(rollout: Rollout, marks: list[bytes | None], begin: int, end: int, row: int, index: int) -> bool:
    """Whether a token of a turn is not that of the weights that it names."""
    for position, at in enumerate(range(begin, end)):
        mark = marks[at]
        if mark is None or int(rollout.tokens[at]) != script.token(mark, row, index, position):
            return True
    return False
