"""Jobs of the benchmark: the demo's, with a preset, or with an age of data and a correction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.shapes import JOBS
from services.cli.overrides import apply_change, load_job
from services.common.spec.choices import ImportanceCorrection, Preset
from services.common.spec.job import parse_spec

_CRITIC = ("critic.lr=1.0e-3", "critic.lr_warmup_steps=5")
_CURRENT = ("off_policy.max_off_policy_steps=0",)
PRESET_CHANGES: Mapping[Preset, tuple[str, ...]] = {
    Preset.DAPO: (),
    Preset.GRPO: (),
    Preset.DR_GRPO: (),
    Preset.RLOO: (),
    Preset.REINFORCE_PLUS_PLUS: (),
    Preset.REINFORCE_PLUS_PLUS_BASELINE: (),
    Preset.GSPO: _CURRENT,
    Preset.CISPO: _CURRENT,
    Preset.PPO: _CRITIC,
}
"""Preset → changes of the demo's job for its small model: roles and rates that the preset does not set itself.

CISPO bounds weights, not the policy's movement: at the demo's rate, with data two steps old, it forgets the task. GSPO's clips are so
narrow that they take most of the gradient of data that is a step old. Both take data of the current policy.
"""
PRESET_SCHEDULE = ("learner.steps=260", "learner.lr_schedule=cosine")
"""Steps: more than the demo's 220, since with RLOO's KL the policy learns more slowly. At a constant rate the
accuracy of the last step varies by some hundredths from run to run, and the table would compare that."""

AGES = (0, 1, 4, 8)
"""off_policy.max_off_policy_steps of the study."""
CORRECTIONS: Mapping[ImportanceCorrection, tuple[str, ...]] = {
    ImportanceCorrection.NONE: (),
    ImportanceCorrection.TRUNCATED: (
        "algorithm.importance_correction=truncated",
        "algorithm.importance_weight_cap=2.0",
    ),
}
"""Correction → changes of the job."""
SHARED = ("reference={}", "checkpoint.interval_steps=10000", "checkpoint.export=false")
"""Changes of every job. A reference with a coefficient of 0 is only measured: every row has its KL."""


def preset_job(preset: Preset, model: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The job's document for a preset. Raises ConfigError when a change does not apply, or the spec is not valid."""
    name = f"preset-{preset.replace('_', '-')}"
    return _job(name, model, (f"algorithm.preset={preset}", *PRESET_SCHEDULE, *PRESET_CHANGES[preset], *changes))


def aged_job(age: int, correction: ImportanceCorrection, model: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The job's document for an age and a correction. Raises as `preset_job`."""
    age_change = f"off_policy.max_off_policy_steps={age}"
    return _job(f"age-{age}-{correction}", model, (age_change, *CORRECTIONS[correction], *changes))


def _job(name: str, model: Path, changes: Sequence[str]) -> dict[str, Any]:
    document = load_job(JOBS / "demo.yaml", (f"name={name}", *SHARED))
    document["model"]["path"] = str(model)
    for change in changes:
        apply_change(document, change)
    parse_spec(json.dumps(document))
    return document
