"""Progress of a followed job: one line per step under fixed headings, and a progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.common.jobs.step_record import StepRecord, number

HEADINGS = (
    ("step", 5), ("reward", 7), ("accuracy", 9), ("accept", 7), ("age", 5), ("gen tok/s", 10), ("train tok/s", 12),
    ("sync s", 7), ("pause s", 8),
)  # fmt: skip


def heading() -> str:
    """The line above the steps."""
    return " ".join(name.rjust(width) for name, width in HEADINGS)


def step_line(step: StepRecord) -> str:
    """One step as a line. `reward` and `accuracy` cover all judged rollouts, not only the informative ones."""
    cells = (
        str(step.step), number(step.reward, ".3f"), number(step.accuracy, ".3f"), number(step.accept_rate, ".2f"),
        number(step.policy_age_mean, ".2f"), number(step.generated_tokens_per_s, ".0f"),
        number(step.trained_tokens_per_s, ".0f"), number(step.sync_s, ".3f"), number(step.pause_s, ".3f"),
    )  # fmt: skip
    return " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, HEADINGS, strict=True))


def score(result: dict[str, Any]) -> str:
    """Mean accuracy of an evaluation with its standard error, where it has one. Example: `0.412 ± 0.021`."""
    error = result.get("avg_at_k_se")
    return f"{number(result.get('avg_at_k'), '.3f')}{'' if error is None else f' ± {error:.3f}'}"


def eval_line(result: dict[str, Any]) -> str:
    """One evaluation as a line, with the policy versions that sampled its rollouts."""
    versions = f"{result['min_policy_version']}..{result['max_policy_version']}"
    missing = result.get("rollouts_not_judged")
    unjudged = f", {missing} rollouts not judged" if missing else ""
    return (
        f"  held-out evaluation, policy versions {versions}: avg@{result['k']} {score(result)}, "
        f"pass@{result['k']} {number(result['pass_at_k'], '.3f')} over {result['tasks']} tasks{unjudged} "
        f"({result['seconds']:.0f} s)"
    )


class ProgressBoard:
    """A progress bar below the lines; without a terminal, the lines alone."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._shown = ""
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("queued", total=steps)

    def __enter__(self) -> Self:
        self._progress.start()
        self.say(heading())
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: StepRecord) -> None:
        """Prints a step, and advances the bar."""
        self.say(step_line(step))
        self._progress.update(self._task, completed=step.step)

    def record(self, job: Mapping[str, Any]) -> None:
        """Shows the job's state beside the bar, and a new cause of a state in a line."""
        shown = f"{job['state']}{': ' + job['cause'] if job['cause'] else ''}"
        if shown != self._shown:
            self._shown = shown
            self._progress.update(self._task, description=job["state"], completed=job["step"])
            if job["cause"]:
                self.say(f"  the job is {shown}")
