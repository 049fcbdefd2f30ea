"""The four kinds of panel that the dashboards are made of. Each panel has a title, a description, a unit and its queries."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DataTransformerConfig
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TOKENS_PER_S = "suffix: tok/s"

Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, heatmap.Panel, table.Panel)


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series. Example: Query('up', '{{instance}}')."""

    expr: str
    legend: str = ""


def graph(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    stacked: bool = False,
    top: float | None = None,
) -> timeseries.Panel:
    """Lines over time, from 0 where all values are positive; `top`: the axis' end where the range is known."""
    panel = _fill(timeseries.Panel(), title, description, unit, queries, width).height(8)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull"])
    ).tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    panel.axis_soft_min(0).line_width(1.5).fill_opacity(40 if stacked else 8)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.min(0).max(top)
    return panel


def number(title: str, description: str, unit: str, *queries: Query, width: int = 4) -> stat.Panel:
    """The newest value, large, with its course behind it."""
    panel = _fill(stat.Panel(), title, description, unit, queries, width).height(4)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel.graph_mode(BigValueGraphMode.AREA)
    panel.text_mode(BigValueTextMode.VALUE_AND_NAME if len(queries) > 1 else BigValueTextMode.VALUE)
    return panel


def buckets(title: str, description: str, unit: str, metric: str, *, width: int = 12) -> heatmap.Panel:
    """A histogram over time: how many observations fell into each bucket."""
    query = Query(f"sum by (le) (increase({metric}_bucket[$__rate_interval]))", "{{le}}")
    panel = _fill(heatmap.Panel(), title, description, unit, (query,), width, PromQueryFormat.HEATMAP).height(8)
    panel.calculate(False).color(
        heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").exponent(0.5).steps(64)
    )
    return panel.y_axis(heatmap.YAxisConfig().unit(unit))


def rows(title: str, description: str, query: Query, columns: dict[str, str], *, width: int = 12) -> table.Panel:
    """A table with one row per series of an instant query; `columns`: label → heading, in order."""
    panel = _fill(table.Panel(), title, description, "short", (query,), width, PromQueryFormat.TABLE).height(8)
    hidden = {name: True for name in ("Time", "Value", "__name__", "job", "instance") if name not in columns}
    order = {name: number for number, name in enumerate(columns)}
    options = {"excludeByName": hidden, "indexByName": order, "renameByName": columns}
    return panel.with_transformation(DataTransformerConfig(id_val="organize", options=options))


def _fill(
    panel: AnyPanel,
    title: str,
    description: str,
    unit: str,
    queries: tuple[Query, ...],
    width: int,
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> AnyPanel:
    panel.title(title).description(description).unit(unit).span(width).datasource(DATASOURCE)
    for letter, query in zip(ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).format(form).ref_id(letter)
        target = target.instant() if form is PromQueryFormat.TABLE else target.range()
        panel.with_target(target.datasource(DATASOURCE))
    return panel
