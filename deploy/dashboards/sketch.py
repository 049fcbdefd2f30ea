"""The four kinds of panel in matplotlib, for the previews."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from deploy.dashboards.survey import PanelData, Series

MAX_LEGEND = 8
MAX_ROWS = 10
COLORS = ["#1f5fa8", "#d98c1f", "#3d8b5a", "#c0392b", "#8e6bbf", "#3aa6a6", "#7a6a53", "#d16ba5"]
Drawn = list[tuple[str, Series]]
"""Legend and series."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where a panel is drawn."""

    figure: Any
    card: Any
    """Axes of the whole panel, title included, without ticks."""
    inner: tuple[float, float, float, float]
    """Left, bottom, width and height for axes with ticks, as shares of the figure."""
    span: tuple[float, float]
    """Unix seconds from left to right."""

    def axes(self) -> Any:  # noqa: ANN401  matplotlib is untyped here
        """Axes with the time below."""
        axes = self.figure.add_axes(self.inner, facecolor="white")
        axes.set_xlim(0, self.span[1] - self.span[0])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
        axes.tick_params(labelsize=7, length=2, colors="#555")
        return axes


def lines(canvas: Canvas, panel: PanelData, drawn: Drawn) -> None:
    """Lines over time, stacked where the panel is."""
    axes = canvas.axes()
    floor: dict[float, float] = {}
    for place, (legend, series) in enumerate(drawn):
        color = COLORS[place % len(COLORS)]
        times = [at - canvas.span[0] for at, _ in series.points]
        values = [value for _, value in series.points]
        if panel.stacked:
            below = [floor.get(at, 0.0) for at, _ in series.points]
            values = [low + value for low, value in zip(below, values, strict=True)]
            floor |= {at: value for (at, _), value in zip(series.points, values, strict=True)}
            axes.fill_between(times, below, values, color=color, alpha=0.35, linewidth=0)
        axes.plot(times, values, color=color, linewidth=1.2, label=legend if place < MAX_LEGEND else None)
    axes.yaxis.set_major_formatter(lambda value, _: text_of(value, panel.unit))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.25)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _goes_below_zero(drawn) else 0.0)
    if any(legend for legend, _ in drawn):
        axes.legend(fontsize=6.5, frameon=False, loc="upper right", ncols=2)


def _goes_below_zero(drawn: Drawn) -> bool:
    return any(value < 0 for _, series in drawn for _, value in series.points)


def number(canvas: Canvas, panel: PanelData, drawn: Drawn) -> None:
    """The newest value, large."""
    newest = [value for _, series in drawn for _, value in series.points if math.isfinite(value)][-1:]
    shown = text_of(newest[0], panel.unit) if newest else "no data"
    canvas.card.text(
        0.5, 0.4, shown, transform=canvas.card.transAxes, ha="center", va="center", fontsize=20, color=COLORS[2]
    )


def buckets(canvas: Canvas, _panel: PanelData, drawn: Drawn) -> None:
    """Prometheus' buckets are cumulative: each row shows what is in its bucket and not in the one below."""
    axes = canvas.axes()
    ordered = sorted(drawn, key=lambda item: float(item[0]))
    times = sorted({at for _, series in ordered for at, _ in series.points})
    cells, below = [], [0.0] * len(times)
    for _, series in ordered:
        known = dict(series.points)
        here = [known.get(at, 0.0) for at in times]
        cells.append([max(0.0, high - low) for high, low in zip(here, below, strict=True)])
        below = here
    axes.pcolormesh([at - canvas.span[0] for at in times], range(len(cells)), cells, cmap="Oranges", shading="nearest")
    axes.set_yticks(range(len(ordered)), [f"≤ {legend}" for legend, _ in ordered])


def rows(canvas: Canvas, _panel: PanelData, drawn: Drawn) -> None:
    """The rows as they were at the end; where nothing is left of them, as they were last."""
    newest = max((series.points[-1][0] for _, series in drawn), default=canvas.span[1])
    left = [series for _, series in drawn if series.points[-1][0] == newest]
    card, names = canvas.card, sorted({name for series in left for name in series.labels})
    lines = [names, *([series.labels.get(name, "") for name in names] for series in left[:MAX_ROWS])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        text = "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        style = {"fontsize": 8, "family": "monospace", "weight": "normal" if number else "bold"}
        card.text(0.04, 0.8 - 0.08 * number, text, transform=card.transAxes, **style)


KINDS = {"timeseries": lines, "stat": number, "heatmap": buckets, "table": rows}


def text_of(value: float, unit: str) -> str:
    """A value with its Grafana unit. Example: `text_of(0.25, "percentunit")` is `25%`."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit in {"bytes", "Bps"}:
        power = min(4, int(math.log(abs(value), 1024))) if abs(value) >= 1 else 0
        return f"{value / 1024**power:.3g} {['', 'Ki', 'Mi', 'Gi', 'Ti'][power]}B{'/s' if unit == 'Bps' else ''}"
    if unit == "s" and abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    ends = {"s": " s", "ops": " /s", "reqps": " req/s", "short": "", "none": ""}
    return f"{value:.4g}{ends.get(unit, unit.removeprefix('suffix:'))}"
