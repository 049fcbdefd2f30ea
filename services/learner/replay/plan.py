"""Which steps are rerun, from what, and what they are held against. No torch here."""

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
from services.common.models.directory import resolve_model
from services.common.spec.job import JobSpec, parse_recorded_spec, problems_of
from services.learner.storage.checkpoints import sound_checkpoints
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal, JournalError

RESULTS = "results.jsonl"
"""What rank 0 finds, an object a line, in a pass's directory."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one set of ranks reruns; travels to them as JSON.

    Example: Pass(folder="/home/jobs/demo-3f2a91c0", spec={…}, model_dir="/home/models/tiny", load="…/checkpoints/step-00000050",
    start=50, last=60, checkpoints={"60": "…/checkpoints/step-00000060"}, work="/tmp/millrace-replay-x/recorded")
    """

    folder: str
    """The job's own folder: the journal is read from it, nothing is written."""
    spec: dict[str, Any]
    model_dir: str
    load: str | None
    """Directory of the ranks' state to begin with; None begins with the model."""
    start: int
    """Policy version to begin with: the steps after it are rerun."""
    last: int
    checkpoints: dict[str, str]
    """Step → directory of a checkpoint to hold the ranks' state against."""
    work: str
    """A directory for what the ranks write."""
    keep_state_at: int | None = None
    """Step after which the ranks' state is kept, in `work/state`."""
    keep_weights: bool = False
    """Whether the weights before and after are kept, in `work/before` and `work/after` (.safetensors)."""
    compare_with: str | None = None
    """Another pass's `work`, whose weights those at the end are held against."""

    def write(self) -> Path:
        """Puts it into `work`, which is made."""
        path = Path(self.work) / "pass.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be replayed of a job, and the proof that the journal holds."""

    spec: JobSpec
    folder: Path
    model_dir: Path
    first: int
    """Version that the range begins with."""
    last: int
    start: int
    """Version that the ranks begin with: that of the newest checkpoint up to `first`, else 0."""
    load: Path | None
    digests: dict[int, str]
    """Policy version → recorded digest of its weights, from `start` to `last`, where the journal has it."""
    checkpoints: dict[int, Path]
    """The checkpoints of the steps after `start`."""
    remarks: tuple[str, ...] = field(default=())

    @property
    def begins_with(self) -> str:
        """For people."""
        return f"the checkpoint of step {self.start}" if self.load else "the model that the job began with"


def make_plan(folder: Path, settings: Settings, first: int, last: int | None) -> Plan:
    """Looks at the job's folder and decides where to begin.

    Args:
        folder: `<home>/jobs/<job>`.
        settings: where models lie.
        first: policy version to begin with, 0 for the initial weights; the steps after it are proved.
        last: the last step; None: of the journal.

    Raises:
        ConfigError: the range is not in the journal, or nothing is there to begin with.
        JournalError: a record up to the range's end is damaged; names file and place.
    """
    spec = parse_recorded_spec((folder / SPEC_FILE).read_text())
    sound, damaged = sound_checkpoints(folder)
    checkpoints = {step: checkpoint.path for step, checkpoint in sound.items()}
    begun = max((step for step in checkpoints if step <= first), default=0)
    steps, digests = _scan(folder, last)
    end = steps[-1] if steps else 0
    if last is not None and last > end:
        raise ConfigError(f"--to {last}: the journal ends at step {end}")
    last = end if last is None else last
    if not 0 <= first < last:
        raise ConfigError(
            f"--from {first}: must be a policy version from 0 to {last - 1}; the steps after it are rerun"
        )
    missing = next((step for step in range(begun + 1, last + 1) if step not in set(steps)), None)
    if missing is not None:
        raise ConfigError(
            f"--from {first}: step {missing} is not in the journal, and no checkpoint that is whole lies between it and step {first}"
        )
    if begun not in checkpoints and spec.checkpoint.load is not None:
        whole = ", ".join(map(str, checkpoints)) or "none"
        raise ConfigError(
            f"--from {first}: the job began with checkpoint.load, not with its model; its own checkpoints: {whole}"
        )
    return Plan(
        spec=spec,
        folder=folder,
        model_dir=resolve_model(spec.model.path, settings),
        first=first,
        last=last,
        start=begun,
        load=checkpoints.get(begun),
        digests={version: digests[version] for version in range(begun, last + 1) if digests.get(version)},
        checkpoints={step: path for step, path in checkpoints.items() if begun < step <= last},
        remarks=tuple(damaged.values()),
    )


def _scan(folder: Path, last: int | None) -> tuple[list[int], dict[int, str]]:
    """Steps that the journal trains, and the digests of versions; read no further than the record that names version `last`."""
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
    return ([step for step in steps if last is None or step <= last], digests)


SECTIONS = ("algorithm", "learner")
RECORDED = ("algorithm.filter_groups_", "learner.steps")
"""Beginnings of those in the sections that decide what is recorded: which groups a batch holds, and how many batches there are."""


def changed_spec(recorded: JobSpec, document: dict[str, Any]) -> tuple[JobSpec, dict[str, Any]]:
    """The spec in a changed document, and path → new value of every setting that differs.

    Raises:
        ConfigError: an unknown key or a wrong value (names the field), a setting that recorded data cannot follow, or no change at all.
    """
    try:
        changed = JobSpec.model_validate(document)
    except ValidationError as error:
        raise ConfigError(*problems_of(error, "--set ")) from error
    before, after = recorded.model_dump(mode="json"), changed.model_dump(mode="json")
    changes = {path: value for path, _, value in differences(before, after)}
    for path in changes:
        if path.partition(".")[0] not in SECTIONS or path.startswith(RECORDED):
            raise ConfigError(
                f"--set {path}: decides what is sampled or which groups a step gets, and that is recorded; "
                "a replay can change the loss (algorithm.…) and the optimizer (learner.…)"
            )
    if not changes:
        raise ConfigError("--set: every value is the recorded one; there is nothing to compare")
    return changed, changes
