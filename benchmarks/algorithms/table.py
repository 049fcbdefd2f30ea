"""Tables of the outcomes, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.algorithms.figures import LAST_STEPS, Outcome
from services.common.spec.choices import ImportanceCorrection, Preset

UNKNOWN = "–"
"""A figure that a job does not have."""


def preset_section(head: str, outcomes: Mapping[Preset, Outcome]) -> list[str]:
    """Lines of the presets, in the order of `outcomes`; `head`: when and on what they were measured."""
    columns = (
        "preset",
        "steps",
        "seconds",
        "held-out accuracy",
        "gain",
        "KL to the reference",
        "entropy",
        "explained variance",
    )
    rows = [
        [
            f"`{preset}`", str(len(outcome.steps)), _number(outcome.seconds, 0), *_accuracies(outcome),
            _number(outcome.final("reference_kl"), 4), _number(outcome.final("entropy"), 3),
            _number(outcome.final("explained_variance"), 2),
        ]
        for preset, outcome in outcomes.items()
    ]  # fmt: skip
    note = (
        f"KL, entropy and explained variance are means of the last {LAST_STEPS} steps, in nats where they have a unit."
    )
    return ["", head, "", *_table(columns, rows), "", note, *_failures(outcomes.items()), ""]


def age_section(
    head: str, outcomes: Mapping[tuple[int, ImportanceCorrection], Outcome], picture: str | None
) -> list[str]:
    """Lines of the study of ages; `picture`: the curves' place, relative to the document."""
    columns = (
        "`max_off_policy_steps`",
        "`importance_correction`",
        "mean age",
        "steps",
        "seconds",
        "held-out accuracy",
        "gain",
        "mismatch KL",
        "mean weight",
    )
    rows = [
        [
            str(age), f"`{correction}`", _number(outcome.overall("policy_age_mean"), 2), str(len(outcome.steps)),
            _number(outcome.seconds, 0), *_accuracies(outcome), _number(outcome.overall("mismatch_kl_k3"), 4),
            _number(outcome.overall("importance_weight"), 3),
        ]
        for (age, correction), outcome in outcomes.items()
    ]  # fmt: skip
    failures = _failures((f"age {age}, {correction}", outcome) for (age, correction), outcome in outcomes.items())
    image = [] if picture is None else [f"![Reward over steps and seconds by age of the data]({picture})", ""]
    return ["", head, "", *_table(columns, rows), "", *image, *failures]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _failures(outcomes: Iterable[tuple[str, Outcome]]) -> list[str]:
    ended = [(name, outcome) for name, outcome in outcomes if outcome.state != "succeeded"]
    return [f"{name}: {outcome.state}: {outcome.cause or 'no cause'}" for name, outcome in ended]


def _accuracies(outcome: Outcome) -> list[str]:
    """The cells of the accuracy before and after, and of the gain."""
    return [
        f"{_number(outcome.before, 3)} → {_number(outcome.after, 3)}",
        UNKNOWN if outcome.gain is None else f"{outcome.gain:+.3f}",
    ]


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
