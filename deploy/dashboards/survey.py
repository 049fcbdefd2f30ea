"""What the dashboards and the alert rules ask, and what a live Prometheus answers.

deploy/grafana/dashboards/*.json ──► panels ──► queries ─┐
deploy/prometheus/rules/*.yml ──► rules ──► conditions ──┴─► Prometheus ──► series
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import yaml

DEPLOY = Path(__file__).parents[1]
DASHBOARDS = DEPLOY / "grafana" / "dashboards"
RULES = DEPLOY / "prometheus" / "rules"

COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel. Example: Target("up", "{{instance}}")."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class PanelData:
    """A panel as Grafana gets it."""

    dashboard: str
    """File name without its ending."""
    title: str
    description: str
    unit: str
    kind: str
    """timeseries, stat, heatmap or table."""
    grid: tuple[int, int, int, int]
    """x, y, width, height; the dashboard is 24 wide."""
    stacked: bool
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert rule."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer."""

    labels: dict[str, str]
    points: list[tuple[float, float]]
    """(Unix seconds, value); NaN where the query says so."""

    @property
    def has_data(self) -> bool:
        """Whether any value is finite."""
        return any(math.isfinite(value) for _, value in self.points)


@dataclass(frozen=True, slots=True)
class Answer:
    """What Prometheus answered to one query."""

    asked_by: str
    """`learning: Loss`, or an alert's name."""
    expr: str
    """As it was asked, placeholders filled in."""
    legend: str
    series: list[Series]

    @property
    def with_data(self) -> int:
        """How many series have a finite value."""
        return sum(series.has_data for series in self.series)


class Prometheus:
    """Asks a Prometheus server over HTTP."""

    def __init__(self, url: str) -> None:
        """`url`: its base, http://127.0.0.1:9090."""
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """A range query; times in Unix seconds.

        Raises:
            httpx.HTTPStatusError: Prometheus refuses the query.
        """
        answer = self._http.post(
            "/api/v1/query_range", data={"query": expr, "start": start, "end": end, "step": max(step, 0.1)}
        )
        answer.raise_for_status()
        return [_series(item) for item in answer.json()["data"]["result"]]

    def get(self, path: str) -> Any:  # noqa: ANN401  JSON
        """Another question of its API, `/api/v1/targets` say."""
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.json()["data"]


def ask(prometheus: Prometheus, start: float, end: float) -> list[Answer]:
    """Asks the query of every panel and the conditions of every rule over a time range."""
    step = (end - start) / 240

    def answer(asked_by: str, expr: str, legend: str = "") -> Answer:
        return Answer(asked_by, expr, legend, prometheus.over(expr, start, end, step))

    return [
        answer(f"{panel.dashboard}: {panel.title}", plain(target.expr), target.legend)
        for panel in panels()
        for target in panel.targets
    ] + [answer(rule.name, condition) for rule in rules() for condition in conditions(rule.expr)]


def panels(folder: Path = DASHBOARDS) -> list[PanelData]:
    """Every panel of every dashboard."""
    return [
        _panel(path.stem, item)
        for path in sorted(folder.glob("*.json"))
        for item in json.loads(path.read_text())["panels"]
    ]


def rules(folder: Path = RULES) -> list[Rule]:
    """Every alert rule."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yml"))]
    return [Rule(rule["alert"], rule["expr"]) for file in files for group in file["groups"] for rule in group["rules"]]


def plain(expr: str, interval_s: int = 15) -> str:
    """The expression with Grafana's placeholders filled in: the interval, and all jobs."""
    return expr.replace("$__rate_interval", f"{interval_s}s").replace("$job_id", ".*")


def conditions(expr: str) -> list[str]:
    """What an alert rule compares, without the comparisons: it must exist for the rule to be able to fire.

    Example: `rate(a[5m]) > 1 and on () b == 0` gives `rate(a[5m])` and `b`.
    """
    return list(_left_sides(promql_parser.parse(expr)))


def metric_names(expr: str) -> set[str]:
    """Names of the metrics that an expression selects."""
    selectors = (node for node in _nodes(promql_parser.parse(expr)) if isinstance(node, promql_parser.VectorSelector))
    return {selector.name for selector in selectors if selector.name is not None}


def legend_labels(legend: str) -> set[str]:
    """Labels that a legend shows."""
    return set(re.findall(r"{{\s*(\w+)\s*}}", legend))


def legend_of(target: Target, series: Series) -> str:
    """A series' name in the legend."""
    if not target.legend:
        return ", ".join(f"{k}={v}" for k, v in series.labels.items() if k != "__name__")
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: series.labels.get(found[1], ""), target.legend).strip()


def _panel(dashboard: str, item: dict[str, Any]) -> PanelData:
    defaults = item["fieldConfig"]["defaults"]
    return PanelData(
        dashboard=dashboard,
        title=item["title"],
        description=item.get("description", ""),
        unit=defaults.get("unit", ""),
        kind=item["type"],
        grid=tuple(item["gridPos"][key] for key in "xywh"),
        stacked=defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
        targets=tuple(Target(target["expr"], target["legendFormat"]) for target in item["targets"]),
    )


def _series(item: dict[str, Any]) -> Series:
    return Series(item["metric"], [(float(at), float(value)) for at, value in item["values"]])


def _left_sides(node: promql_parser.Expr) -> Iterator[str]:
    if isinstance(node, promql_parser.ParenExpr):
        yield from _left_sides(node.expr)
    elif isinstance(node, promql_parser.BinaryExpr) and str(node.op) in {"and", "or", "unless"}:
        yield from _left_sides(node.lhs)
        yield from _left_sides(node.rhs)
    elif isinstance(node, promql_parser.BinaryExpr) and str(node.op) in COMPARISONS:
        yield str(node.lhs)
    else:
        yield str(node)


def _nodes(root: promql_parser.Expr) -> list[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []
    promql_parser.walk(root, found.append)
    return found
