"""Verifier bombs beside good answers: no slot is lost beyond its limit, and good answers get their verdicts."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil

from services.common.service.process_tree import is_running
from services.common.streams.types import Verdict, VerdictStatus
from services.reward.pool.messages import Check
from services.reward.pool.pool import Pool
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.unit.reward import odd_package

LIMIT_S = 2.0
GRACE_S = 0.5
"""A slot is free again within the limit of its check and this, kill and fork included."""
SLOTS = 16
MEMORY_MIB = 1024

Bomb = Callable[[random.Random], tuple[str, str]]
"""Gives verifier and response."""


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
    "deep fractions": lambda s: _deep(s, r"\frac{1}{", "}"),
    "huge sum": lambda s: ("math", r"\boxed{" + "+".join(str(s.randint(1, 99)) for _ in range(60_000)) + "}"),
    "huge number": lambda s: ("gsm8k", "#### " + str(_digit(s)) * 3_000_000),
    "backslashes": lambda s: ("math", "\\" * s.randint(10_000, 60_000)),
    "endless regex": lambda s: ("odd_endless_regex", "a" * s.randint(40, 80)),
    "sleep": lambda _: ("odd_sleep", "600"),
}


class TimedPool(Pool):
    """Notes how long each slot took from the beginning of a batch's last check to being free again, kills and forks included."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """As the pool."""
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


class _Begun(dict[int, float]):
    """The pool's note of what runs in each slot; remembers when the newest check of each began."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[int, float] = {}

    def __setitem__(self, slot: int, limit: float) -> None:
        self.at[slot] = time.monotonic()
        super().__setitem__(slot, limit)


def bombs(options: Options, grace_s: float = GRACE_S) -> Result:
    """`count` bombs and as many good answers, all at once, for SLOTS slots."""
    return asyncio.run(_run(options, grace_s))


async def _run(options: Options, grace_s: float) -> Result:
    result, source, started = (
        Result("verifier bombs", options.count, options.seed),
        random.Random(options.seed),
        time.monotonic(),
    )
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(options.count)]
    source.shuffle(kinds)
    checks = [_check(*KINDS[kind](source)) for kind in kinds]
    goods = [_good(source) for _ in range(options.count)]
    before = set(psutil.Process().children(recursive=True))
    async with TimedPool(SLOTS, environment=odd_package.install(options.home / "odd")) as pool:
        # A first check in every slot: what follows is about bombs, not about starting.
        await asyncio.gather(*(pool.judge([_check("math", r"\boxed{42}")]) for _ in range(SLOTS)))
        pool.held_s.clear()
        bombing = asyncio.gather(*(pool.judge([check]) for check in checks))
        judging = asyncio.gather(*(pool.judge([check]) for check, _ in goods))
        verdicts = [verdict for (verdict,) in await bombing]
        judged = [verdict for (verdict,) in await judging]
        again = await pool.judge([_check("gsm8k", "#### 42")] * SLOTS)
    result.violations += _wrong_verdicts(kinds, verdicts)
    for (check, reward), verdict in zip(goods, judged, strict=True):
        if verdict.reward != reward:
            result.violations.append(f"the good answer {check.response!r} is {verdict.status}: {verdict.detail[:80]}")
    if any(verdict.reward != 1.0 for verdict in again):
        result.violations.append("a slot does not judge any more")
    late = [seconds for seconds in pool.held_s if seconds > LIMIT_S + grace_s]
    result.violations += [f"a slot was lost for {seconds:.2f} s, of {LIMIT_S + grace_s:g} s" for seconds in late]
    left = [process for process in set(psutil.Process().children(recursive=True)) - before if is_running(process)]
    result.violations += [f"a process is left: {process}" for process in left]
    result.extra = {
        "slot held longest s": round(max(pool.held_s), 2), "limit s": LIMIT_S,
        "bombs": dict(sorted(Counter(str(verdict.status) for verdict in verdicts).items())),
        "good answers": len(judged),
    }  # fmt: skip
    result.seconds = time.monotonic() - started
    return result


def _wrong_verdicts(kinds: list[str], verdicts: list[Verdict]) -> list[str]:
    """No bomb is worth anything, none counts as a failure of the service, and what sleeps has run out of time."""
    wrong = []
    for kind, verdict in zip(kinds, verdicts, strict=True):
        bad = verdict.reward or verdict.status is VerdictStatus.FAILED
        if bad or (kind == "sleep" and verdict.status is not VerdictStatus.TIMEOUT):
            wrong.append(
                f"the verdict on a bomb ({kind}) is {verdict.status}, reward {verdict.reward}: {verdict.detail[:80]}"
            )
    return wrong


def _check(verifier: str, response: str) -> Check:
    return Check(verifier, response, "42", "chaos", {}, LIMIT_S, memory_mib=MEMORY_MIB)


def _good(source: random.Random) -> tuple[Check, float]:
    """A good check, of a right answer or a wrong one, with its reward."""
    answer, reward = source.choice([("42", 1.0), ("41", 0.0)])
    verifier, text = source.choice([("gsm8k", "so #### {}"), ("math", r"so \boxed{{{}}}")])
    return _check(verifier, text.format(answer)), reward
