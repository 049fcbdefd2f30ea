"""The comparison of the resume row sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.common.checkpoints.manifest import CHECKPOINTS_DIR, WrittenFile, digest_of_file
from services.learner.storage.checkpoints import CheckpointStore
from tests.chaos.resume import STEPS, Course, differences

STOPS = [3, 7]
FILE = "rank-00000.safetensors"
ONE_BIT = torch.tensor([1.0, 1.0 + 2**-23])
"""The second differs from 1 in its last bit."""


def course(
    folder: Path, *, heads: int, moment: torch.Tensor = ONE_BIT[:1], saved: tuple[int, ...] = (4, STEPS)
) -> Course:
    store = CheckpointStore(folder / CHECKPOINTS_DIR, keep=1000)
    for step in saved:
        path = store.begin(step)
        save_file({"moment": moment.clone(), "rng.python": torch.rand(1)}, path / FILE, metadata={"step": str(step)})
        store.commit(step, {}, [WrittenFile(FILE, (path / FILE).stat().st_size, digest_of_file(path / FILE))])
    steps = range(1, STEPS + 1)
    return Course(
        folder, {step: [2 * step, 2 * step + 1] for step in steps}, {step: f"{step:032x}" for step in steps}, heads
    )


def test_two_runs_of_one_course_do_not_differ(tmp_path: Path) -> None:
    straight, stopped = course(tmp_path / "a", heads=1), course(tmp_path / "b", heads=3)
    assert differences(straight, stopped, STOPS) == []


CHANGES: dict[str, tuple[Callable[[Course], Course], str]] = {
    "other groups": (lambda run: replace(run, groups=run.groups | {8: [17, 16]}), "step 8 trained groups [17, 16], not [16, 17]"),
    "other weights": (lambda run: replace(run, digests=run.digests | {8: "f" * 32}), "the weights before step 8 differ"),
    "a step that is missing": (
        lambda run: replace(run, groups={k: v for k, v in run.groups.items() if k != 8}), "step 8 trained groups None, not [16, 17]",
    ),
    "a stop that was none": (lambda run: replace(run, heads=2), "heads began 1 and 2 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_found(tmp_path: Path, name: str) -> None:
    change, said = CHANGES[name]
    straight, stopped = course(tmp_path / "a", heads=1), course(tmp_path / "b", heads=3)
    assert differences(straight, change(stopped), STOPS) == [said]


def test_one_bit_of_one_moment_is_found(tmp_path: Path) -> None:
    straight, stopped = course(tmp_path / "a", heads=1), course(tmp_path / "b", heads=3, moment=ONE_BIT[1:])
    assert differences(straight, stopped, STOPS) == [f"{FILE} of step 4 differs", f"{FILE} of step {STEPS} differs"]


def test_a_comparison_without_a_last_checkpoint_is_none(tmp_path: Path) -> None:
    straight, stopped = course(tmp_path / "a", heads=1), course(tmp_path / "b", heads=3, saved=(4,))
    assert differences(straight, stopped, STOPS) == ["there is no last checkpoint"]


def test_a_straight_run_whose_steps_change_nothing_proves_nothing(tmp_path: Path) -> None:
    same = dict.fromkeys(range(1, STEPS + 1), "0" * 32)
    straight, stopped = (
        replace(course(tmp_path / name, heads=heads), digests=same) for name, heads in (("a", 1), ("b", 3))
    )
    assert differences(straight, stopped, STOPS) == [
        "the run that was not stopped did not train each step, or a step changed nothing"
    ]
