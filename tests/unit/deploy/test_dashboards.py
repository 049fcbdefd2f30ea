"""The dashboards' JSON is what the code says, and asks only for what the services export."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path

import promql_parser
import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric

from deploy.dashboards.__main__ import DASHBOARDS, outdated
from deploy.dashboards.sketch import KINDS, text_of
from deploy.dashboards.survey import PanelData, conditions, legend_labels, metric_names, panels, plain, rules

OF_PROMETHEUS = {"up", "ALERTS"}
ROOT = Path(__file__).parents[3]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}
BASE_UNITS = ("_seconds", "_bytes", "_ratio", "_tokens", "_nats", "_steps", "_versions", "_turns")


@cache
def families() -> dict[str, Metric]:
    """Every metric family that a service exports, by name."""
    from services.gateway.metrics import GatewayMetrics
    from services.learner.__main__ import export_disk

    for path in (ROOT / "services").rglob("metrics.py"):  # a metric registers itself
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    agent = CollectorRegistry()
    export_disk(Path(), agent)
    registries = (REGISTRY, agent, GatewayMetrics().registry)
    return {family.name: family for registry in registries for family in registry.collect()}


def sample_names() -> set[str]:
    return {name + end for name, family in families().items() for end in SUFFIXES.get(family.type, ("",))}


def test_the_json_is_up_to_date() -> None:
    assert outdated() == [], "run `python -m deploy.dashboards`"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel.dashboard}-{panel.title}")
def test_a_panel_says_what_it_shows_and_asks_for_what_there_is(panel: PanelData) -> None:
    assert len(panel.description) > 12
    assert panel.unit
    assert panel.kind in KINDS
    assert panel.targets
    for target in panel.targets:
        expr = plain(target.expr)
        assert "$" not in expr, "a placeholder that no one fills in"
        promql_parser.parse(expr)
        names = metric_names(expr)
        assert names, "no metric in it"
        assert names <= sample_names() | OF_PROMETHEUS
        if len(panel.targets) > 1:
            assert target.legend, "several queries need legends"


def test_no_two_panels_of_a_dashboard_overlap_or_share_a_title() -> None:
    for name in DASHBOARDS:
        mine = [panel for panel in panels() if panel.dashboard == name]
        assert [title for title, count in Counter(panel.title for panel in mine).items() if count > 1] == []
        cells = Counter(
            (column, row)
            for x, y, width, height in (panel.grid for panel in mine)
            for column in range(x, x + width)
            for row in range(y, y + height)
        )
        assert set(cells.values()) == {1}
        assert max(column for column, _ in cells) < 24


def test_every_rule_asks_for_what_there_is() -> None:
    for rule in rules():
        assert metric_names(rule.expr) <= sample_names() | OF_PROMETHEUS, rule.name
        assert conditions(rule.expr)


def test_every_metric_has_a_help_text_a_prefix_and_a_base_unit() -> None:
    own = {name: family for name, family in families().items() if not name.startswith(("python_", "process_"))}
    assert len(own) > 70
    for name, family in own.items():
        assert re.match(r"millrace_(gateway|rollout|reward|learner|environment|process|build)_[a-z0-9_]+$", name), name
        assert len(family.documentation) > 10, name
        if family.type == "histogram":
            assert name.endswith(BASE_UNITS), name
        assert not re.search(r"_(ms|milliseconds|kb|mb|gib|percent)$", name), name


def test_no_metric_carries_a_job_but_the_one_that_names_the_learners_job() -> None:
    from services.learner.loops.metrics import JOB_INFO

    labels = {
        label
        for registry_collector in REGISTRY._collector_to_names
        if registry_collector is not JOB_INFO
        for label in getattr(registry_collector, "_labelnames", ())
    }
    assert not labels & {"job_id", "job", "group_id", "instance"}


def test_conditions_are_what_a_rule_compares() -> None:
    assert conditions("rate(a[5m]) > 1 and on () (b == 0)") == ["rate(a{}[5m])", "b{}"]
    assert conditions("x / y < 0.1 unless z > 2") == ["x{} / y{}", "z{}"]
    assert conditions("absent(up)") == ["absent(up{})"]


def test_legend_labels_are_those_in_braces() -> None:
    assert legend_labels("{{verifier}} p95 {{ job_id }}") == {"verifier", "job_id"}


def test_values_are_written_with_their_unit() -> None:
    assert [text_of(0.25, "percentunit"), text_of(3 * 1024**3, "bytes"), text_of(0.052, "s")] == [
        "25%",
        "3 GiB",
        "52 ms",
    ]
    assert [text_of(1500, "suffix: tok/s"), text_of(0, "Bps"), text_of(7, "short")] == ["1500 tok/s", "0 B/s", "7"]
