"""Figures of the simulation, and their table: a row for each figure, a column for each number of servers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulated.hops import HopRates
from benchmarks.simulated.stack import GROUP_SIZE, GROUPS_PER_STEP, Shape, Window

_FAMILIES = ("head", "weights", "reward", "Redis")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one number of servers."""

    shape: Shape
    hops: HopRates
    attach_s: float
    """From the first process's start until the last server had weights."""
    window: Window
    idle: Window
    alone: float
    """Groups/s of the servers and Redis by themselves."""

    def ms(self, name: str) -> float:
        """Processor milliseconds of a family per group."""
        return 1e3 * self.window.cpu_s[name] / self.window.groups


def report(found: list[Figures]) -> None:
    """Prints the table."""
    shape = found[0].shape
    print(
        f"groups of {GROUP_SIZE} × {shape.tokens} tokens, {shape.entry_bytes} bytes an entry; {GROUPS_PER_STEP} groups a step; "
        f"weights {'over gRPC and relays' if shape.apart else 'by file'}\n"
    )
    for name, value in _ROWS:
        print(f"{name:46s}" + "".join(f"{value(figures):>10s}" for figures in found))
    for figures in found:
        calls = sorted(figures.window.commands.items(), key=lambda item: -item[1])[:8]
        per_group = ", ".join(f"{name} {count / figures.window.groups:.2f}" for name, count in calls)
        print(f"Redis commands a group, {figures.shape.servers} servers: {per_group}")


def _cpu_row(name: str) -> tuple[str, Callable[[Figures], str]]:
    return f"CPU ms a group: {name}", lambda figures: f"{figures.ms(name):.2f}"


def _idle_row(name: str) -> tuple[str, Callable[[Figures], str]]:
    return f"idle, CPU ms a second: {name}", lambda f: f"{1e3 * f.idle.cpu_s[name] / f.idle.seconds:.1f}"


def _memory_row(name: str) -> tuple[str, Callable[[Figures], str]]:
    return f"memory MiB: {name}", lambda f: f"{f.window.rss[name] / _MIB:.0f}"


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


_ROWS: list[tuple[str, Callable[[Figures], str]]] = [
    ("rollout servers", lambda f: str(f.shape.servers)),
    ("groups/s", lambda f: f"{f.window.groups / f.window.seconds:.0f}"),
    ("groups/s of the servers alone", lambda f: f"{f.alone:.0f}"),
    ("cores in use", lambda f: f"{sum(f.window.cpu_s.values()) / f.window.seconds:.2f}"),
    *(_cpu_row(name) for name in _FAMILIES),
    ("CPU ms a group: these four", lambda f: f"{sum(f.ms(name) for name in _FAMILIES):.2f}"),
    ("CPU ms a group: servers, without a model", lambda f: f"{f.ms('servers'):.2f}"),
    ("CPU ms a version and server: weights", lambda f: f"{f.ms('weights') * GROUPS_PER_STEP / f.shape.servers:.2f}"),
    *(_idle_row(name) for name in (*_FAMILIES, "servers")),
    ("start → every server has weights, s", lambda f: f"{f.attach_s:.1f}"),
    ("version written → median server current, s", lambda f: _median(f.window.halfway)),
    ("version written → all current, s, median", lambda f: _median(f.window.current)),
    ("version written → all current, s, longest", lambda f: f"{max(f.window.current, default=float('nan')):.2f}"),
    *(_memory_row(name) for name in _FAMILIES),
    ("connections of Redis", lambda f: str(f.window.connections)),
    ("hop in the servers, ms, median", lambda f: f"{1e3 * _quantile(f.window.hops, 0.5):.1f}"),
    ("hop in the servers, ms, p99", lambda f: f"{1e3 * _quantile(f.window.hops, 0.99):.1f}"),
    ("bare hops/s, one connection", lambda f: f"{f.hops.bare_one:.0f}"),
    ("bare hops/s, a connection for each server", lambda f: f"{f.hops.bare:.0f}"),
    ("our hops/s, a connection for each server", lambda f: f"{f.hops.ours:.0f}"),
    ("ours ÷ bare", lambda f: f"{f.hops.ours / f.hops.bare:.2f}"),
    ("ours, eight at once for each server, ÷ bare", lambda f: f"{f.hops.together / f.hops.bare:.2f}"),
    ("hop alone, ms, p99: bare", lambda f: f"{1e3 * f.hops.bare_p99_s:.1f}"),
    ("hop alone, ms, p99: ours", lambda f: f"{1e3 * f.hops.ours_p99_s:.1f}"),
]
