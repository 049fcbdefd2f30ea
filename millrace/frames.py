"""DataFrames of what jobs have measured. pandas is imported when the first of them is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from millrace.records import JsonObject
from services.common.errors import MillraceError

if TYPE_CHECKING:
    import pandas as pd


class MissingPackageError(MillraceError, ImportError):
    """A function needs a package that is not installed; the message says how to install it."""


def step_frame(rows: Sequence[JsonObject]) -> pd.DataFrame:
    """One row for each record, by its step. What is itself an object has a column for each of its values (`groups.trained`)."""
    frame = _pandas().json_normalize(list(rows))
    return frame.set_index("step") if len(rows) else frame.rename_axis("step")


def rollout_frame(groups: Iterable[JsonObject]) -> pd.DataFrame:
    """One row for each rollout, with the columns of its group before its own. Where one is an episode, each has a list of `turns`."""
    rows = [
        {name: value for name, value in group.items() if name != "rollouts"} | rollout
        for group in groups
        for rollout in group.get("rollouts", ())
    ]
    if any("turns" in row for row in rows):
        rows = [{**row, "turns": row.get("turns", [])} for row in rows]
    return _pandas().DataFrame(rows)


def comparison_frame(found: JsonObject) -> pd.DataFrame:
    """One row for each job of `GET /jobs/compare`, by its id: how far and how good it is, then the settings that differ."""
    rows = []
    for number, run in enumerate(found["runs"]):
        best = run["best_eval"] or {}
        row: dict[str, Any] = {"job": run["id"], "state": run["state"], "step": run["step"], "steps": run["steps"]}
        row["reward"] = run["reward"]
        row |= {
            "best_avg_at_k": best.get("avg_at_k"),
            "best_avg_at_k_se": best.get("avg_at_k_se"),
            "best_step": best.get("step"),
        }
        rows.append(row | {item["path"]: item["values"][number] for item in found["differences"]})
    return _pandas().DataFrame(rows).set_index("job")


def _pandas() -> Any:  # noqa: ANN401  a module
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingPackageError('a DataFrame needs pandas: pip install "millrace[notebook]"') from error
    return pd
