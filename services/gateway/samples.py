"""Filter of a job's samples: the groups that have rollouts of a kind, with those rollouts only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.streams.types import FinishReason, Purpose


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """What is wanted of groups and rollouts; what is not set selects nothing out."""

    purpose: Purpose | None = None
    group: int | None = None
    wrong: bool = False
    failed: bool = False
    truncated: bool = False
    grep: str = ""

    def select(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The groups that have such a rollout, in the order given, each with such rollouts only."""
        for sample in samples:
            if self.purpose not in {None, sample.get("purpose")} or self.group not in {None, sample.get("group_id")}:
                continue
            if not self._of_rollouts:
                yield dict(sample)
            elif rollouts := [rollout for rollout in sample.get("rollouts", ()) if self._wants(rollout)]:
                yield {**sample, "rollouts": rollouts}

    @property
    def _of_rollouts(self) -> bool:
        return self.wrong or self.failed or self.truncated or bool(self.grep)

    def _wants(self, rollout: Mapping[str, Any]) -> bool:
        accuracy = rollout.get("accuracy")
        return (
            (not self.wrong or (accuracy is not None and accuracy < 1.0))
            and (not self.failed or rollout.get("reward") is None)
            and (not self.truncated or rollout.get("finish_reason") == FinishReason.LENGTH)
            and (not self.grep or self.grep.casefold() in str(rollout.get("text", "")).casefold())
        )
