"""Plan of a replay: the steps to rerun, their starting point, and the records to compare with. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from services.common.config.settings import Settings
from services.common.differences import differences
from services.common.errors import ConfigError
from services.common.jobs.folder import SPEC_FILE
from services.common.models.roles import RoleModels
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec, parse_recorded_spec, problems_of
from services.learner.storage.checkpoints import verify_checkpoints
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal, JournalError

RESULTS = "results.jsonl"
"""Rank 0's results, one JSON object per line, in a pass's directory."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The steps that one set of ranks reruns; sent to them as JSON.

    Example: Pass(folder="/home/jobs/demo-3f2a91c0", spec={…}, load="…/checkpoints/step-00000050",
    start=50, last=60, checkpoints={"60": "…/checkpoints/step-00000060"}, work="/tmp/millrace-replay-x/recorded")
    """

    folder: str
    """The job's own folder: the journal is read from it, and nothing is written to it."""
    spec: dict[str, Any]
    load: str | None
    """Directory of the ranks' initial state; None: the model."""
    start: int
    """Initial policy version: the steps after it are rerun."""
    last: int
    checkpoints: dict[str, str]
    """Step → directory of a checkpoint, which the ranks' state is compared with."""
    work: str
    """A directory for the ranks' output."""
    keep_state_at: int | None = None
    """Step after which the ranks' state is kept, in `work/state`."""
    keep_weights: bool = False
    """Whether the final weights are kept, in `work/after.safetensors`."""
    compare_with: str | None = None
    """`work` of another pass, whose final weights these are compared with."""

    def write(self) -> Path:
        """Creates `work` and writes the pass into it."""
        path = Path(self.work) / "pass.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """The pass in a file of `write`."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a job that can be replayed, and the recorded proof."""

    spec: JobSpec
    folder: Path
    first: int
    """First version of the range."""
    last: int
    start: int
    """Version that the ranks begin with: the newest checkpoint's up to `first`, else 0."""
    load: Path | None
    digests: dict[int, str]
    """Policy version → digest of its weights, from `start` to `last`, where the journal has it."""
    checkpoints: dict[int, Path]
    """The checkpoints of the steps after `start`."""
    remarks: tuple[str, ...] = field(default=())

    @property
    def begins_with(self) -> str:
        """The initial state, as text."""
        return f"the checkpoint of step {self.start}" if self.load else "the model that the job began with"


def make_plan(folder: Path, settings: Settings, first: int, last: int | None) -> Plan:
    """Reads the job's folder, `<home>/jobs/<job>`, and chooses the initial state.

    The steps after policy version `first` (0: the initial weights) are proved, up to step `last` (None: the journal's last).

    Raises:
        ConfigError: the range is not in the journal, or damaged there, or there is no state to begin with.
    """
    spec = parse_recorded_spec((folder / SPEC_FILE).read_text())
    RoleModels.of(spec, settings)  # so that a model that is gone is named here, not by the ranks
    sound, damaged = verify_checkpoints(folder)
    checkpoints = {step: checkpoint.path for step, checkpoint in sound.items()}
    start = max((step for step in checkpoints if step <= first), default=0)
    steps, digests = _scan(folder, last)
    end = steps[-1] if steps else 0
    if last is not None and last > end:
        raise ConfigError(f"--to {last}: the journal ends at step {end}")
    last = end if last is None else last
    option = f"--from {first}"
    if not 0 <= first < last:
        raise ConfigError(f"{option}: must be a policy version from 0 to {last - 1}; the steps after it are rerun")
    missing = min({*range(start + 1, last + 1)}.difference(steps), default=None)
    if missing is not None:
        between = f"no checkpoint that is whole lies between it and step {first}"
        raise ConfigError(f"{option}: step {missing} is not in the journal, and {between}")
    if start not in checkpoints and spec.checkpoint.load is not None:
        whole = ", ".join(map(str, checkpoints)) or "none"
        began = "the job began with checkpoint.load, not with its model"
        raise ConfigError(f"{option}: {began}; its own checkpoints: {whole}")
    return Plan(
        spec=spec,
        folder=folder,
        first=first,
        last=last,
        start=start,
        load=checkpoints.get(start),
        digests={version: digests[version] for version in range(start, last + 1) if digests.get(version)},
        checkpoints={step: path for step, path in checkpoints.items() if start < step <= last},
        remarks=tuple(damaged.values()),
    )


def _scan(folder: Path, last: int | None) -> tuple[list[int], dict[int, str]]:
    """Steps that the journal trains, and the digests of versions; reads only up to the record that has the digest of version `last`."""
    steps: list[int] = []
    digests: dict[int, str] = {}
    if not (folder / JOURNAL_DIR).is_dir():
        raise ConfigError(f"{folder}: there is no journal: nothing was trained, or it ran elsewhere")
    try:
        for record in Journal(folder / JOURNAL_DIR).records():
            if record.groups:
                steps.append(record.step)
            digests[record.base_version] = record.weights_digest
            if last is not None and record.step > last:
                break
    except JournalError as error:
        if last is None or not steps or steps[-1] < last:
            whole = f"; the steps up to {steps[-1]} can be replayed with --to {steps[-1]}" if steps else ""
            raise ConfigError(f"{error}{whole}") from error
    return [step for step in steps if last is None or step <= last], digests


SECTIONS = ("algorithm", "learner", "critic", "reference")
FIXED = ("algorithm.filter_groups_", "learner.steps")
"""Prefixes of settings in these sections that determine the record: the groups of a batch, and the number of batches."""


def changed_spec(recorded: JobSpec, document: dict[str, Any]) -> tuple[JobSpec, dict[str, Any]]:
    """The spec in a changed document, and path → new value of every setting that differs.

    Raises:
        ConfigError: an unknown key or a wrong value (names the field), a setting that determines the record, or no change at all.
    """
    try:
        changed = JobSpec.model_validate(document, context=RECORDED)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, JobSpec, "--set ")) from error
    before, after = recorded.model_dump(mode="json"), changed.model_dump(mode="json")
    changes = {path: value for path, _, value in differences(before, after)}
    for path in changes:
        if path.partition(".")[0] not in SECTIONS or path.startswith(FIXED):
            raise ConfigError(
                f"--set {path}: decides what is sampled or which groups a step gets, and that is recorded; "
                "a replay can change the loss (algorithm.…), the optimizer (learner.…), critic.… and reference.…"
            )
    if not changes:
        raise ConfigError("--set: every value is the recorded one; there is nothing to compare")
    return changed, changes
