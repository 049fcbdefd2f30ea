"""Progress bar of a followed job, in a notebook and on a terminal, by tqdm where that is installed."""

from __future__ import annotations

from typing import Any

from millrace.follower import Evaluated, JobEvent, StateChanged, StepTrained


class ProgressBar:
    """A bar with the job's state, step and reward; it shows nothing where `shown` is false, or tqdm is not installed."""

    def __init__(self, job_id: str, *, shown: bool) -> None:
        self._job_id, self._shown = job_id, shown
        self._bar: Any = None
        self._figures: dict[str, str] = {}

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def update(self, event: JobEvent) -> None:
        """Shows what the event says."""
        bar = self._bar or (self._open(event) if self._shown else None)
        if bar is None:
            return
        if isinstance(event, StateChanged):
            bar.total = event.record["steps"]
            bar.set_description(f"{self._job_id} {event.state}", refresh=False)
        elif isinstance(event, StepTrained):
            bar.update(max(0, event.step - bar.n))  # a job that was there already is followed from its first step on
            self._figures |= {} if event.reward is None else {"reward": f"{event.reward:.3f}"}
        elif isinstance(event, Evaluated) and event.accuracy is not None:
            self._figures["held-out"] = f"{event.accuracy:.3f}"
        bar.set_postfix(self._figures, refresh=True)

    def _open(self, event: JobEvent) -> Any:  # noqa: ANN401  tqdm has no types
        try:
            from tqdm.auto import tqdm
        except ImportError:
            self._shown = False
            return None
        begun = event.record["step"] if isinstance(event, StateChanged) else 0
        self._bar = tqdm(desc=self._job_id, unit="step", initial=begun)
        return self._bar
