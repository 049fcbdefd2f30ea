"""Text output of `millrace plan`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from services.cli.views.jobs import print_rows
from services.common.capacity.plan import Forecast, Limit, Plan, Row

SAME = 0.02
"""Two forecasts that differ by a smaller share are shown as one."""
LIMITS = {
    Limit.SERVERS: "the rollout servers are the limit: the learner waits for them",
    Limit.LEARNER: "the learner is the limit: more rollout servers would only wait",
    Limit.SLOTS: "each side waits for the other: off_policy.max_off_policy_steps leaves too few groups under way",
}
_COLUMNS = (
    "servers",
    "steps/h",
    "samples/s",
    "tokens/s",
    "servers idle",
    "learner idle",
    "policy age",
    "oldest",
    "limit",
)


def print_plan(console: Console, plan: Plan) -> None:
    """What was measured, a row for each number of servers, and what limits the job."""
    rates, (least, most) = plan.rates, plan.balanced
    learner_idle = 1.0 - rates.learner_s / rates.period_s
    print_rows(console, [
        ("measured", f"{rates.steps} steps up to step {rates.last_step}, {rates.servers} rollout server{_s(rates.servers)}"),
        ("speed", f"{3600 / rates.period_s:,.0f} steps/h, {rates.samples_per_s:,.1f} samples/s, {rates.tokens_per_s:,.0f} tokens/s"),
        ("step", f"learner {rates.learner_s:.3g} s, waiting {rates.period_s - rates.learner_s:.3g} s"),
        ("group", f"{rates.group_s:.3g} s beside {rates.groups_at_once - 1:.3g} others; accept rate {rates.accept_rate:.2f}"),
        ("idle", f"servers {1 - rates.busy_share:.0%}, learner {learner_idle:.0%}"),
        ("policy age", f"{rates.policy_age_mean:.1f}, oldest {rates.policy_age_max}"),
    ])  # fmt: skip
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in plan.rows:
        table.add_row(f"{row.servers}{' *' if least <= row.servers <= most else ''}", *_cells(*row.both))
    table.add_row("colocated", *_cells(plan.colocated.slow, plan.colocated.fast))
    console.print(table)
    now = next((row for row in plan.rows if row.servers == rates.servers), None)
    if now is not None:
        for limit in dict.fromkeys(forecast.limit for forecast in now.both):
            console.print(f"with {rates.servers}: {LIMITS[limit]}")
    many = str(least) if least == most else f"{least} to {most}"
    console.print(f"* balanced: {many} rollout server{_s(most)} reach 95 % of what any number would")
    if any(_differ(row) for row in plan.rows):
        console.print(
            "a range: this run does not show whether a server that samples fewer groups at once takes as long for each of them, "
            "or less in proportion"
        )
    console.print("each server is supposed to have a device of its own, as quick as the one that was measured")
    console.print(
        f"colocated: {rates.servers} server{_s(rates.servers)} and the learner take turns on the devices of both; from no quicker "
        "there than now to quicker in proportion"
    )


def _cells(slow: Forecast, fast: Forecast) -> tuple[str, ...]:
    return (
        _range(slow.steps_per_h, fast.steps_per_h, ",.0f"),
        _range(slow.samples_per_s, fast.samples_per_s, ",.1f"),
        _range(slow.tokens_per_s, fast.tokens_per_s, ",.0f"),
        _range(slow.servers_idle, fast.servers_idle, ".0%"),
        _range(slow.learner_idle, fast.learner_idle, ".0%"),
        _range(slow.policy_age_mean, fast.policy_age_mean, ".1f"),
        _range(slow.policy_age_max, fast.policy_age_max, ".0f"),
        " or ".join(dict.fromkeys((slow.limit.value, fast.limit.value))),
    )


def _range(slow: float, fast: float, form: str) -> str:
    """Both figures, the lower one first; one where they look alike."""
    low, high = sorted((slow, fast))
    if format(low, form) == format(high, form) or (high >= 1.0 and high - low < SAME * high):
        return format((low + high) / 2, form)
    return f"{low:{form}}–{high:{form}}"


def _differ(row: Row) -> bool:
    slow, fast = row.both
    return fast.steps_per_h - slow.steps_per_h >= SAME * fast.steps_per_h


def _s(count: int) -> str:
    return "" if count == 1 else "s"
