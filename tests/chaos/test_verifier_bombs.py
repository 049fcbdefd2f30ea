"""Verifier bombs at 16 concurrent: no slot is lost for longer than its limit and half a second, and good checks go on as if nothing were.

`MILLRACE_CHAOS_BOMBS=1000` for the whole count; MILLRACE_CHAOS_SEED for other bombs.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from services.common.types import VerdictStatus
from services.reward.check import Check
from services.reward.pool import Pool
from tests.unit.reward.conftest import plugins  # noqa: F401  a fixture

BOMBS = int(os.environ.get("MILLRACE_CHAOS_BOMBS", "64"))
SEED = int(os.environ.get("MILLRACE_CHAOS_SEED", "1"))
SLOTS = 16
LIMIT_S = 2.0
MARGIN_S = 0.5 if BOMBS >= 1000 else 1.0
"""The slice runs on machines that others use at the same time."""
MEMORY_MIB = 1024

pytestmark = pytest.mark.timeout(120 + BOMBS)

Bomb = Callable[[random.Random], tuple[str, str]]


def _digit(source: random.Random) -> int:
    return source.randint(5, 9)


def _deep(source: random.Random, opening: str, closing: str) -> tuple[str, str]:
    depth = source.randint(1000, 8000)
    return "math", f"${opening * depth}1{closing * depth}$"


KINDS: dict[str, Bomb] = {
    "tower": lambda s: ("math", rf"\boxed{{{_digit(s)}^{{{_digit(s)}^{{{_digit(s)}^{{{_digit(s)}}}}}}}}}"),
    "tower in text": lambda s: ("math", f"the answer is {_digit(s)}**{_digit(s)}**{_digit(s)}**{_digit(s)}"),
    "factorial": lambda s: ("math", f"${s.randint(10**8, 10**9)}!$"),
    "binomial": lambda s: ("math", rf"$\binom{{{s.randint(10**9, 10**10)}}}{{{s.randint(10**8, 5 * 10**8)}}}$"),
    "deep parentheses": lambda s: _deep(s, "(", ")"),
    "deep braces": lambda s: _deep(s, "{", "}"),
    "deep roots": lambda s: _deep(s, r"\sqrt{", "}"),
    "huge sum": lambda s: ("math", r"\boxed{" + "+".join(str(s.randint(1, 99)) for _ in range(60_000)) + "}"),
    "huge number": lambda s: ("gsm8k", "#### " + str(_digit(s)) * 3_000_000),
    "endless regex": lambda s: ("odd_endless_regex", "a" * s.randint(40, 80)),
    "sleep": lambda _: ("odd_sleep", "600"),
}


class _Begun(dict[int, float]):
    """The pool's note of what runs in each slot; remembers when the newest check of each began."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[int, float] = {}

    def __setitem__(self, slot: int, limit: float) -> None:
        self.at[slot] = time.monotonic()
        super().__setitem__(slot, limit)


class TimedPool(Pool):
    """Notes how long each slot took from the beginning of a batch's last check to being free again, kills and forks included."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._running = self._begun = _Begun()
        self.held_s: list[float] = []

    async def _take(self) -> list[Any]:
        task = asyncio.current_task()
        assert task is not None
        slot = int(task.get_name().partition("-")[2])
        if slot in self._begun.at:
            self.held_s.append(time.monotonic() - self._begun.at.pop(slot))
        return await super()._take()


def _bombs(source: random.Random) -> list[tuple[str, Check]]:
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(BOMBS)]
    source.shuffle(kinds)
    made = [(kind, *KINDS[kind](source)) for kind in kinds]
    return [(kind, _check(verifier, response)) for kind, verifier, response in made]


def _check(verifier: str, response: str, reference: str = "42") -> Check:
    return Check(verifier, response, reference, "chaos", {}, LIMIT_S, memory_mib=MEMORY_MIB)


def _goods(source: random.Random) -> list[tuple[Check, float]]:
    """As many good checks as bombs, right and wrong ones, with their rewards."""
    answers = [source.choice([("42", 1.0), ("41", 0.0)]) for _ in range(BOMBS)]
    texts = [("gsm8k", "so #### {}"), ("math", r"so \boxed{{{}}}")]
    return [
        (_check(verifier, text.format(answer)), reward)
        for (answer, reward), (verifier, text) in zip(answers, source.choices(texts, k=BOMBS), strict=True)
    ]


async def test_bombs_cost_their_own_limit_and_nothing_of_the_others(
    plugins: dict[str, str],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = random.Random(SEED)
    bombs, goods = _bombs(source), _goods(source)
    before = set(psutil.Process().children(recursive=True))
    async with TimedPool(SLOTS, environment=plugins) as pool:
        # A first check in every slot: what follows is about bombs, not about starting.
        await asyncio.gather(*(pool.judge([_check("math", r"\boxed{42}")]) for _ in range(SLOTS)))
        pool.held_s.clear()
        began = time.monotonic()
        bombing = asyncio.gather(*(pool.judge([bomb]) for _, bomb in bombs))
        good = asyncio.gather(*(pool.judge([check]) for check, _ in goods))
        verdicts = [verdict for verdicts in await bombing for verdict in verdicts]
        judged = [verdict for verdicts in await good for verdict in verdicts]
        took_s = time.monotonic() - began
        again = await pool.judge([_check("gsm8k", "#### 42")] * SLOTS)
    outcomes = Counter((kind, verdict.status) for (kind, _), verdict in zip(bombs, verdicts, strict=True))
    worst = max(pool.held_s)
    took = f"{took_s:.1f} s, longest slot {worst:.2f} s of {LIMIT_S + MARGIN_S:g} s"
    with capsys.disabled():
        print(f"\n{BOMBS} bombs at {SLOTS} concurrent: {took}")
        print({f"{kind}: {status}": count for (kind, status), count in sorted(outcomes.items())})
    assert worst < LIMIT_S + MARGIN_S, f"a slot was lost for {worst:.2f} s: {sorted(pool.held_s)[-20:]}"
    assert [verdict.reward for verdict in judged] == [reward for _, reward in goods], "good checks suffered"
    assert {verdict.reward for verdict in again} == {1.0}
    assert all(not verdict.reward for verdict in verdicts), "a bomb was rewarded"
    assert not [kind for kind, status in outcomes if status is VerdictStatus.FAILED]
    assert outcomes["sleep", VerdictStatus.TIMEOUT] == sum(kind == "sleep" for kind, _ in bombs)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - before if _runs(p)], "processes are left"


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
