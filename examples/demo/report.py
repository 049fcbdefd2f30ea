"""The run's table as a Markdown file."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from services.cli.views.progress import HEADINGS, eval_line, step_line
from services.common.jobs.step_record import StepRecord


def write_table(
    path: Path, record: dict[str, Any], steps: list[dict[str, Any]], evals: list[dict[str, Any]], seconds: float
) -> None:
    """Writes evaluations, medians and every step."""
    groups = ", ".join(f"{count} {fate}" for fate, count in record["groups"].items())
    lines = [
        f"# {record['id']}: {record['state']} after {record['step']} steps, {seconds:.0f} s in all",
        "",
        *(f"- {eval_line(result).strip()}" for result in evals),
        f"- groups: {groups}",
        (
            f"- median step {_median(steps, 'step_s', 3)} s, of which {_median(steps, 'train_s', 3)} s training "
            f"and {_median(steps, 'wait_s', 3)} s waiting for groups"
        ),
        f"- median weight sync {_median(steps, 'sync_s', 3)} s, of which generation stood still {_median(steps, 'pause_s', 3)} s",
        f"- median mismatch KL {_median(steps, 'mismatch_kl_k3', 6)}",
        "",
        "```",
        " ".join(name.rjust(width) for name, width in HEADINGS),
        *(step_line(StepRecord.model_validate(step)) for step in steps),
        "```",
        "",
    ]
    path.write_text("\n".join(lines))


def _median(steps: list[dict[str, Any]], name: str, digits: int) -> str:
    values = [step[name] for step in steps if step.get(name) is not None]
    return f"{median(values):.{digits}f}" if values else "-"
