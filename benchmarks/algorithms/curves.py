"""Curves of the study of ages: reward over steps, and over seconds, as an SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.algorithms.figures import Outcome
from examples.demo.curve import smooth
from services.common.spec.choices import ImportanceCorrection

WINDOW = 15
"""Steps that a line averages over."""
COLOURS = ("#1f5fa8", "#3d8b5a", "#c77d18", "#c0392b", "#8e6bbf")
"""One for each age, from the youngest."""


def draw_ages(path: Path, outcomes: Mapping[tuple[int, ImportanceCorrection], Outcome]) -> None:
    """Draws every outcome: a colour for each age, solid without a correction and dashed with one."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "millrace"  # the same figures give the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    ages = sorted({age for age, _ in outcomes})
    for (age, correction), outcome in outcomes.items():
        rewards = smooth([step["reward"] for step in outcome.steps], WINDOW)
        look = {
            "color": COLOURS[ages.index(age) % len(COLOURS)],
            "linestyle": "-" if correction is ImportanceCorrection.NONE else "--",
            "linewidth": 1.6,
        }
        numbers = [step["step"] for step in outcome.steps]
        axes[0].plot(numbers, rewards, label=f"age ≤ {age}, {correction}", **look)
        axes[1].plot(outcome.times(), rewards, **look)
    axes[0].set_xlabel("step")
    axes[1].set_xlabel("seconds")
    axes[0].set_ylabel(f"reward, mean of {WINDOW} steps")
    axes[0].legend(loc="lower right", frameon=False, fontsize=8)
    for part in axes:
        part.grid(alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
