"""Table of the results, as Markdown, and its place in a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.figures import (
    Learning,
    Plan,
    Run,
    Spread,
    informative_per_s,
    samples_per_s,
    step_s,
    time_to,
)
from benchmarks.peers.limits import MachineLimits, ShapeLimits

GIB = 1 << 30
UNKNOWN = "–"
"""For a threshold that was not reached, and a ratio to nothing."""


@dataclass(frozen=True, slots=True)
class Result:
    """Runs of one way, in the order of the rounds."""

    plan: Plan
    runs: tuple[Run, ...]
    learned: int
    """The first so many went on until the threshold, if they could."""

    def spread(self, figure: Callable[[Run, int], float]) -> Spread:
        """Spread of a figure over the rounds."""
        return Spread.of([figure(run, self.plan.warm_up) for run in self.runs])

    def ratio(self, other: Result, figure: Callable[[Run, int], float]) -> Spread:
        """Spread of the quotients within each round: what a round did to both cancels out. Infinite where the other's is 0."""
        pairs = zip(self.runs, other.runs, strict=True)
        quotients = []
        for own, its in pairs:
            divisor = figure(its, other.plan.warm_up)
            quotients.append(figure(own, self.plan.warm_up) / divisor if divisor else math.inf)
        return Spread.of(quotients)

    def learning_s(self, learning: Learning) -> Spread:
        """Spread of the time to the threshold; infinite where it was not reached."""
        times = [time_to(run.steps, learning) for run in self.runs[: self.learned]]
        return Spread.of([math.inf if seconds is None else seconds for seconds in times])


def shape_section(
    name: str,
    about: str,
    results: Mapping[str, Result],
    base: str,
    learning: Learning | None,
    limits: ShapeLimits | None,
) -> list[str]:
    """Lines of one shape; `base`: the way that the others are divided by."""
    reward = "" if learning is None else f" reward {learning.threshold:g} after, s |"
    columns = (
        f"| | trained samples/s | ÷ {base} | informative samples/s | ÷ {base} | s a step |{reward} peak memory, GiB |"
    )
    lines = [f"### {name}", "", about, "", columns, "|---" * (columns.count("|") - 1) + "|"]
    for way, result in results.items():
        cells = [
            _range(result.spread(samples_per_s), 1), _range(result.ratio(results[base], samples_per_s), 2),
            _range(result.spread(informative_per_s), 1), _range(result.ratio(results[base], informative_per_s), 2),
            _range(result.spread(step_s), 2),
        ]  # fmt: skip
        if learning is not None:
            cells.append(_range(result.learning_s(learning), 1))
        cells.append(f"{max(run.peak_bytes for run in result.runs) / GIB:.1f}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    if {"async", "sync"} <= results.keys():
        gain = _range(results["async"].ratio(results["sync"], samples_per_s), 2)
        lines += ["", f"Asynchronous ÷ synchronous, trained samples/s: {gain}."]
    return [*lines, "", *([] if limits is None else _limit_lines(limits))]


def _limit_lines(limits: ShapeLimits) -> list[str]:
    rows = [f"| vLLM, {_cores(cores)} | {_number(rate, 1)} |" for cores, rate in limits.engine.items()]
    cores = max(limits.engine)
    return [
        "| alone | samples/s |", "|---|---|", *rows,
        f"| transformers, forward + backward + AdamW, {_cores(cores)} | {_number(limits.plain, 1)} |",
        f"| our learner, {_cores(cores)} | {_number(limits.learner, 1)} |", "",
    ]  # fmt: skip


def machine_section(limits: MachineLimits, shapes: Mapping[str, ShapeLimits]) -> list[str]:
    """Lines of the machine's own limits."""
    rows = [
        f"| float32 matrix multiplication, {_cores(cores)} | {rate / 1e9:.0f} GFLOP/s |"
        for cores, rate in limits.flop_per_s.items()
    ]
    best = max(limits.flop_per_s.values())
    for name, shape in shapes.items():
        share = shape.learner_flop_per_s
        rows.append(
            f"| our learner's useful operations, {name} | {share / 1e9:.0f} GFLOP/s, {share / best:.0%} of that |"
        )
    return [
        "### The machine", "", "| | |", "|---|---|", *rows,
        f"| bare gRPC stream over loopback | {limits.grpc_bytes_per_s / 2**20:,.0f} MiB/s |",
        f"| bare atomic hop of Redis, one client | {limits.hops_per_s:,.0f} a second |", "",
    ]  # fmt: skip


def put_between(document: str, lines: Sequence[str], name: str = "peers") -> str:
    """The document with these lines between its two markers of that name. Raises ValueError unless it has both, once, in order."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = document.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end or opening in after or closing in before:
        raise ValueError(f"there must be one {opening}, and one {closing} after it")
    return "\n".join([before + opening, *lines, closing]) + after


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def _range(spread: Spread, digits: int) -> str:
    """Median, and where there are several values the lowest and the highest."""
    if math.isinf(spread.median):
        return UNKNOWN
    if spread.low == spread.high:
        return _number(spread.median, digits)
    return f"{_number(spread.median, digits)} ({_number(spread.low, digits)} to {_number(spread.high, digits)})"


def _number(value: float, digits: int) -> str:
    """Large values without decimals."""
    if math.isinf(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"
