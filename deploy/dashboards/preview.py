"""Draws each dashboard's panels from a live Prometheus: `python -m deploy.dashboards.preview --prometheus URL --last 600`.

A preview, not Grafana: the panels stand where their gridPos puts them, with their own titles, units, queries and legends.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from pathlib import Path

from deploy.dashboards.sketch import KINDS, Canvas
from deploy.dashboards.survey import PanelData, Prometheus, legend_of, panels, plain

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLUMNS = 24
INCHES_PER_COLUMN, INCHES_PER_ROW = 0.72, 0.36


def draw_all(prometheus: Prometheus, start: float, end: float, folder: Path = IMAGES) -> list[Path]:
    """Writes dashboard-<name>.png for every dashboard; times in Unix seconds."""
    everything = panels()
    names = sorted({panel.dashboard for panel in everything})
    return [
        _draw(name, [p for p in everything if p.dashboard == name], prometheus, (start, end), folder) for name in names
    ]


def _draw(name: str, shown: list[PanelData], prometheus: Prometheus, span: tuple[float, float], folder: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = max(panel.grid[1] + panel.grid[3] for panel in shown)
    width, height = COLUMNS * INCHES_PER_COLUMN, rows * INCHES_PER_ROW + 0.6
    figure = plt.figure(figsize=(width, height), facecolor="#f4f5f5")
    at = datetime.fromtimestamp(span[1], UTC).strftime("%Y-%m-%d %H:%M UTC")
    figure.text(0.01, 1 - 0.3 / height, f"Millrace: {name}", fontsize=14, weight="bold", va="center")
    figure.text(
        0.99,
        1 - 0.3 / height,
        f"preview, rendered from the live run's data, {at}",
        ha="right",
        va="center",
        color="#666",
    )
    for panel in shown:
        drawn = [
            (legend_of(target, series), series)
            for target in panel.targets
            for series in prometheus.over(plain(target.expr), *span, (span[1] - span[0]) / 240)
        ]
        x, y, w, h = panel.grid
        bottom = (rows - y - h) * INCHES_PER_ROW / height
        box = (x / COLUMNS, bottom, w / COLUMNS, h * INCHES_PER_ROW / height)
        card = figure.add_axes((box[0] + 0.003, box[1] + 0.004, box[2] - 0.006, box[3] - 0.008), facecolor="white")
        card.set(xticks=[], yticks=[])
        card.spines[:].set_color("#d9d9d9")
        card.annotate(
            panel.title, (0, 1), xycoords="axes fraction", xytext=(8, -13), textcoords="offset points", fontsize=9
        )
        inner = (box[0] + 0.045, box[1] + 0.36 / height, box[2] - 0.06, box[3] - 0.36 / height - 0.42 / height)
        KINDS[panel.kind](Canvas(figure, card, inner, span), panel, drawn)
    path = folder / f"dashboard-{name}.png"
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards.preview", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="base URL of a live Prometheus")
    parser.add_argument("--last", type=float, default=600.0, help="seconds to show, up to now")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    arguments = parser.parse_args()
    now = time.time()
    draw_all(Prometheus(arguments.prometheus), now - arguments.last, now, arguments.out)


if __name__ == "__main__":
    main()
