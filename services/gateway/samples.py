"""Samples of a job as they are read: the groups that have rollouts of a kind, and their raw texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.jobs.kept_samples import step_of
from services.common.streams.types import FinishReason, Purpose

_TRUNCATED = frozenset(reason for reason in FinishReason if reason.truncated)


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """What is wanted of groups and rollouts; what is not set selects nothing out."""

    purpose: Purpose | None = None
    group: int | None = None
    step: int | None = None
    """The newest policy version that sampled the group."""
    wrong: bool = False
    failed: bool = False
    truncated: bool = False
    grep: str = ""

    def select(self, samples: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The groups that have such a rollout, in the order given, each with such rollouts only."""
        for sample in samples:
            if not self._wants_group(sample):
                continue
            if not self._of_rollouts:
                yield dict(sample)
            elif rollouts := [rollout for rollout in sample.get("rollouts", ()) if self._wants(rollout)]:
                yield {**sample, "rollouts": rollouts}

    def _wants_group(self, sample: Mapping[str, Any]) -> bool:
        return (
            self.purpose in {None, sample.get("purpose")}
            and self.group in {None, sample.get("group_id")}
            and (self.step is None or self.step == step_of(sample))
        )

    @property
    def _of_rollouts(self) -> bool:
        return self.wrong or self.failed or self.truncated or bool(self.grep)

    def _wants(self, rollout: Mapping[str, Any]) -> bool:
        accuracy = rollout.get("accuracy")
        return (
            (not self.wrong or (accuracy is not None and accuracy < 1.0))
            and (not self.failed or rollout.get("reward") is None)
            and (not self.truncated or rollout.get("finish_reason") in _TRUNCATED)
            and (not self.grep or any(self.grep.casefold() in text.casefold() for text in _texts(rollout)))
        )


def _texts(rollout: Mapping[str, Any]) -> Iterator[str]:
    """What came after the prompt: the response, and of an episode also its turns, whose texts are cut elsewhere than the response."""
    yield str(rollout.get("text", ""))
    for turn in rollout.get("turns", ()):
        yield str(turn.get("text", ""))
        if turn.get("turn", 1) > 1:
            yield from (str(message.get("content", "")) for message in turn.get("said", ()))


def token_ids(samples: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Of every group the prompt's token ids, then those of its rollouts; empty where none were kept."""
    return [
        list(ids)
        for sample in samples
        for ids in (
            sample.get("prompt_token_ids", ()),
            *(rollout.get("token_ids", ()) for rollout in sample.get("rollouts", ())),
        )
    ]


def readable(samples: Iterable[Mapping[str, Any]], texts: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """The groups without token ids; with `texts`, in the order of `token_ids`, as `raw_prompt` and each rollout's `raw`."""
    following = iter(texts or ())
    for sample in samples:
        group = {name: value for name, value in sample.items() if name != "prompt_token_ids"}
        ids = len(sample.get("prompt_token_ids", ()))
        if texts is not None:
            group["raw_prompt"] = _cut(sample.get("prompt_tokens", ids) - ids, next(following))
        if "rollouts" in sample:
            group["rollouts"] = [_rollout(rollout, following, raw=texts is not None) for rollout in sample["rollouts"]]
        yield group


def _rollout(rollout: Mapping[str, Any], following: Iterator[str], *, raw: bool) -> dict[str, Any]:
    values = {name: value for name, value in rollout.items() if name != "token_ids"}
    if raw:
        values["raw"] = _cut(rollout.get("tokens", 0) - len(rollout.get("token_ids", ())), next(following))
    return values


def _cut(missing: int, text: str) -> str:
    """The text, with a mark before it where only the last token ids were kept."""
    return f"[…{missing} tokens…]{text}" if missing > 0 else text
