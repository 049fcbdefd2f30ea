"""The learning curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 5
"""Steps that the thick line averages over."""


def draw_curve(path: Path, title: str, steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    """Draws accuracy, accept rate and mismatch KL over steps, with the held-out evaluations, into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1.4), layout="constrained"
    )
    numbers = [step["step"] for step in steps]
    accuracy = [step["accuracy"] for step in steps]
    top.plot(numbers, accuracy, color="#9bbbe0", linewidth=1, label="training rollouts, accuracy per step")
    top.plot(numbers, smooth(accuracy), color="#1f5fa8", linewidth=2, label=f"the same, mean of {WINDOW} steps")
    top.plot(
        [e["step"] for e in evals], [e["avg_at_k"] for e in evals], "o-", color="#c0392b",
        label=f"held-out tasks, avg@{evals[0]['k'] if evals else 'k'}",
    )  # fmt: skip
    top.set_ylabel("accuracy")
    top.set_ylim(0, 1)
    top.set_title(title)
    top.legend(loc="lower right", frameon=False)
    bottom.plot(
        numbers, [step["accept_rate"] for step in steps], color="#3d8b5a", label="accept rate of dynamic sampling"
    )
    bottom.plot(numbers, [step["policy_age_mean"] for step in steps], color="#8e6bbf", label="mean policy_age, steps")
    bottom.set_xlabel("step")
    bottom.set_ylim(0, 1.5 * bottom.get_ylim()[1])  # room for the legend
    bottom.legend(loc="upper right", ncols=2, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(values: list[float | None], window: int = WINDOW) -> list[float | None]:
    """The mean of the last values up to each one; None where there is none."""
    smoothed: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if v is not None]
        smoothed.append(sum(known) / len(known) if known else None)
    return smoothed
