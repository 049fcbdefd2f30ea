"""Files of a finished run, so that its folder stands alone: tables that any program reads, and curves that any browser shows.

metrics.parquet    a row for each step of the job's current course, under the names of `names`     at intervals, and at the end
evals.parquet      the same for evaluations
curves.svg         the main curves                                                                 at the end
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.data.parquet import to_parquet
from services.common.durable import write_durably
from services.common.jobs.folder import JobFolder
from services.gateway.trackers.history import Point
from services.gateway.trackers.names import figures
from services.gateway.trackers.sink import Run

METRICS_FILE, EVALS_FILE, CURVES_FILE = "metrics.parquet", "evals.parquet", "curves.svg"
CURVES = (
    "rollout/reward_mean", "rollout/accuracy_mean", "actor/loss", "actor/entropy", "actor/grad_norm", "off_policy/mismatch_kl_k3",
    "off_policy/policy_age_mean", "response_length/mean", "timing_s/step", "critic/explained_variance", "eval/avg_at_k", "eval/pass_at_k",
)  # fmt: skip
"""Those of them that the job has are drawn."""
COLUMNS = 3


class Files:
    """Writes the files of one job anew at each call."""

    whole = False

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, Path(run.folder)

    def send(self, points: Sequence[Point], own: dict[str, Any], ended: str) -> dict[str, Any]:
        """Writes the tables of the whole history; after the job's end the curves, too."""
        del points, own
        history = JobFolder(self._folder).history()
        tables = {METRICS_FILE: _rows("step", history.steps), EVALS_FILE: _rows("eval", history.evals)}
        for name, rows in tables.items():
            if rows:
                write_durably(self._folder / name, to_parquet(rows))
        if ended and any(tables.values()):
            title = f"{self._run.name}: {ended}"
            write_durably(self._folder / CURVES_FILE, draw([*tables[METRICS_FILE], *tables[EVALS_FILE]], title))
        return {}


def _rows(kind: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"step": item["step"], "at": item.get("at"), **figures(kind, item)} for item in records]


def draw(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    """Small multiples of the figures in CURVES over the step, as SVG that needs no font or script."""
    os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir()) / f"matplotlib-{os.getuid()}"))
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = [name for name in CURVES if any(name in row for row in rows)]
    lines = max(1, -(-len(drawn) // COLUMNS))
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": title, "font.size": 8}):
        figure = Figure(figsize=(11, 0.6 + 2.1 * lines), layout="constrained")
        figure.suptitle(title)
        for place, name in enumerate(drawn, 1):
            shown = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            axes = figure.add_subplot(lines, COLUMNS, place)
            axes.plot(*zip(*shown, strict=True), marker="." if len(shown) < 50 else "", linewidth=1)
            axes.set_title(name, loc="left")
            axes.grid(alpha=0.3)
        data = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(data, metadata={"Date": None})
    return data.getvalue()
