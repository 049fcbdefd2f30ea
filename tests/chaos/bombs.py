"""Verifier bombs beside good answers: no slot is lost beyond its limit, and good answers get their verdicts."""

from __future__ import annotations

import asyncio
import random
import time

from services.common.types import VerdictStatus
from services.reward.check import Check
from services.reward.pool import Pool
from tests.chaos.faults import Options
from tests.chaos.result import Result

LIMIT_S = 2.0
GRACE_S = 0.5
"""A check of a bomb must be answered within its limit and this."""
CONCURRENT = 16

BOMBS = (
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{" + "5^" * 40 + "5}",
    r"\boxed{(10^9)!}",
    r"\boxed{\binom{10^9}{5 \cdot 10^8}}",
    r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    r"\boxed{" + r"\frac{1}{" * 2000 + "1" + "}" * 2000 + "}",
    r"\boxed{" + "9" * 30_000 + "}",
    r"\boxed{" + "1+" * 15_000 + "1}",
    r"\boxed{x" + "^{x" * 1500 + "}" * 1500 + "}",
    r"\boxed{\int_0^1 " + "x^{99}" * 4000 + " dx}",
    "\\" * 30_000,
    "$" * 30_000 + "{" * 1000,
)


def bombs(options: Options) -> Result:
    """`count` bombs, CONCURRENT at once, each with a good answer beside it."""
    return asyncio.run(_run(options))


async def _run(options: Options) -> Result:
    result, rng, started = Result("verifier bombs", 0, options.seed), random.Random(options.seed), time.monotonic()
    answered: dict[str, int] = {}
    longest = 0.0
    async with Pool(CONCURRENT) as pool:
        await pool.judge([_check(r"\boxed{42}", "42", 60.0) for _ in range(CONCURRENT)])  # verifiers are loaded
        gate = asyncio.Semaphore(CONCURRENT)

        async def throw(number: int) -> None:
            nonlocal longest
            async with gate:
                bomb, sent = rng.choice(BOMBS), time.monotonic()
                (verdict,) = await pool.judge([_check(bomb, "42", LIMIT_S)])
                seconds = time.monotonic() - sent
                longest = max(longest, seconds)
                answered[verdict.status] = answered.get(verdict.status, 0) + 1
                if seconds > LIMIT_S + GRACE_S:
                    result.violations.append(f"bomb {number} ({bomb[:30]}…) took {seconds:.2f} s")
                (good,) = await pool.judge([_check(rf"The answer is \boxed{{{number}}}.", str(number), LIMIT_S)])
                if good.status is not VerdictStatus.SCORED or good.reward != 1.0:
                    result.violations.append(
                        f"the good answer beside bomb {number} is {good.status}: {good.detail[:80]}"
                    )

        await asyncio.gather(*(throw(number) for number in range(options.count)))
    result.count = options.count
    result.extra = {"verdicts_on_bombs": answered, "longest_s": round(longest, 2), "limit_s": LIMIT_S}
    result.seconds = time.monotonic() - started
    return result


def _check(response: str, reference: str, timeout_s: float) -> Check:
    return Check("math", response, reference, "math", {}, timeout_s)
