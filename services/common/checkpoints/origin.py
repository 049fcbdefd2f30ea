"""Origin of a new job's weights, named by `checkpoint.load`: another job's checkpoint, or a Hugging Face directory.

    load                        weights   optimizer   random states   step, data position
    checkpoint                     ✓          ✓             ✓            the checkpoint's
      of another layout            ✓          ✓             as new       the checkpoint's
      + no_load_optim              ✓          as new        ✓            the checkpoint's
      + no_load_rng                ✓          ✓             as new       the checkpoint's
      + finetune                   ✓          as new        as new       0
      of weights only              ✓          as new        as new       0
    Hugging Face directory         ✓          as new        as new       0

A layout is the sizes of tensor, pipeline and data parallelism, and whether the optimizer is distributed. `millrace weights to-megatron`
makes checkpoints of weights only. The names have their meaning of Megatron-LM and MindSpeed-RL. A job with a checkpoint of its own resumes
from that one, completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from services.common.checkpoints.fingerprint import Identity, identity_of
from services.common.checkpoints.manifest import (
    CHECKPOINTS_DIR,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    CheckpointRefused,
    check_size,
    newest_manifest,
    read_manifest,
    verify_files,
)
from services.common.config.paths import locate
from services.common.config.settings import Settings
from services.common.errors import ConfigError, ModelError
from services.common.jobs.folder import SPEC_FILE
from services.common.models.directory import inspect_model, read_json
from services.common.models.weight_files import check_weights
from services.common.spec.job import JobSpec

FIELD = "checkpoint.load"
_LAYOUT = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "context_parallel_size", "expert_parallel_size",
    "use_distributed_optimizer",
)  # fmt: skip
WEIGHTS_ONLY = "weights_only"
"""In the state of a manifest whose files hold no optimizer, no random states and no step."""
NAMES_PLACES = "names_places"
"""In the state of a manifest whose files say which parameter each state of the optimizer belongs to: they can be loaded in any layout."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint or directory that `checkpoint.load` names."""

    path: Path
    """A checkpoint's directory, or a Hugging Face one."""
    checkpoint: Checkpoint | None
    """None for a Hugging Face directory."""

    def gives_weights_only(self, spec: JobSpec) -> bool:
        """Whether a job with this spec takes nothing but the weights, and begins at step 0."""
        return self.checkpoint is None or self.is_weights_only or spec.checkpoint.finetune

    @property
    def is_weights_only(self) -> bool:
        """Whether it is a checkpoint that holds nothing else."""
        return self.checkpoint is not None and bool(self.checkpoint.state.get(WEIGHTS_ONLY))


class OriginFacts(TypedDict):
    """Results of the trial, as MessagePack values."""

    path: str
    """Source of the weights."""
    step: int | None
    """Of the checkpoint; None for a Hugging Face directory, and for a checkpoint of weights only."""


def find_origin(spec: JobSpec, settings: Settings) -> Origin | None:
    """The origin that `checkpoint.load` names, or None. In a job's folder it is the newest checkpoint whose manifest verifies.

    Raises:
        ConfigError: it is outside the allowed directories, is not there, or is neither of the two; names the field and the path.
    """
    name = spec.checkpoint.load
    if name is None:
        return None
    roots = [settings.job_dir(""), settings.models_dir, *settings.model_roots]
    path = locate(name, roots, field=FIELD, error=ConfigError)
    if not path.is_dir():
        message = f"{path} is not there: it must be a job's id, a checkpoint's or a model's directory"
        raise ConfigError(message, field=FIELD)
    if (path / CHECKPOINTS_DIR).is_dir() or (path / SPEC_FILE).is_file():
        path /= CHECKPOINTS_DIR
    with _naming_field():
        checkpoint = read_manifest(path) if (path / MANIFEST).is_file() else newest_manifest(path)
    if checkpoint is None and path.name == CHECKPOINTS_DIR:
        raise ConfigError(f"{path} has no whole checkpoint yet", field=FIELD)
    if checkpoint is None and not (path / "config.json").is_file():
        raise ConfigError(f"{path} is neither a checkpoint of a job nor a Hugging Face model directory", field=FIELD)
    return Origin(checkpoint.path if checkpoint is not None else path, checkpoint)


def check_origin(origin: Origin, spec: JobSpec, identity: Identity) -> None:
    """Checks that the job can begin there, but not the weights' content. Raises ConfigError with the differences."""
    if origin.checkpoint is None:
        with _naming_field():
            shape = inspect_model(origin.path).described()
        _check_shape(origin, shape, identity)
        return
    recorded = _recorded_identity(origin, origin.checkpoint)
    _check_shape(origin, recorded["shape"], identity)
    if origin.gives_weights_only(spec):
        return
    compared = [name for name in ("dataset", "tokenizer") if getattr(identity, name)]
    problems = [f"{name} differs" for name in compared if recorded.get(name) != getattr(identity, name)]
    problems += _differences(recorded["spec"], spec, [("model", "dtype")])
    if not (spec.checkpoint.no_load_optim or origin.checkpoint.state.get(NAMES_PLACES)):
        differences = _differences(recorded["spec"], spec, [("learner", name) for name in _LAYOUT])
        problems += [f"{text}, and it is of a release whose optimizer has no other layout" for text in differences]
    if origin.checkpoint.step >= spec.learner.steps:
        problems.append(f"it is at step {origin.checkpoint.step}, and learner.steps is {spec.learner.steps}")
    if problems:
        _reject(origin, f"{'; '.join(problems)} (checkpoint.finetune takes its weights only)")


def verify_origin(checkpoint: Checkpoint) -> None:
    """Verifies every file of the checkpoint. Raises ConfigError, which names the file, when one is damaged."""
    with _naming_field():
        verify_files(checkpoint)


def check_new_origin(
    spec: JobSpec, settings: Settings, model_dir: Path, dataset: str, until: float
) -> OriginFacts | None:
    """Finds the origin and checks that the job can begin there, like the learner but without the files' digests.

    The model in `model_dir` has passed its trial. An empty `dataset` (fingerprint of the training source) is unknown and not compared.
    Values of a Hugging Face directory are checked until `until`, monotonic seconds.

    Raises:
        ConfigError: `checkpoint.load: <path>: what does not fit`.
    """
    origin = find_origin(spec, settings)
    if origin is None:
        return None
    identity = identity_of("", spec, model_dir, dataset)
    check_origin(origin, spec, identity)
    folder, checkpoint = origin.path, origin.checkpoint
    with _naming_field():
        for file in checkpoint.files if checkpoint is not None else ():
            check_size(folder / file.name, file.bytes)
        if checkpoint is None:
            check_weights(folder, inspect_model(folder), read_json(folder / "config.json"), until)
    step = None if checkpoint is None or origin.is_weights_only else checkpoint.step
    return OriginFacts(path=str(folder), step=step)


@contextmanager
def _naming_field() -> Iterator[None]:
    """Raises errors of checkpoints and models again, as a ConfigError that names the field."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(str(error), field=FIELD) from error
    except (CheckpointRefused, ModelError) as error:
        raise ConfigError(*(problem.message for problem in error.problems), field=FIELD) from error


def _recorded_identity(origin: Origin, checkpoint: Checkpoint) -> dict[str, Any]:
    identity = checkpoint.state.get("identity")
    spec = identity.get("spec") if isinstance(identity, dict) else None
    sections = [spec.get(name) for name in ("learner", "model")] if isinstance(spec, dict) else [None]
    if not isinstance(identity, dict) or not all(isinstance(part, dict) for part in (identity.get("shape"), *sections)):
        _reject(origin, "its manifest does not say what it was made of")
    return identity


def _differences(recorded: dict[str, dict[str, object]], spec: JobSpec, fields: Iterable[tuple[str, str]]) -> list[str]:
    """A setting that is newer than the record has its default there."""
    here = spec.model_dump(mode="json")
    there = {
        (section, name): recorded[section].get(name, type(getattr(spec, section)).model_fields[name].default)
        for section, name in fields
    }
    return [
        f"{section}.{name} is {there[section, name]} there and {here[section][name]} here"
        for section, name in fields
        if there[section, name] != here[section][name]
    ]


def _check_shape(origin: Origin, shape: dict[str, object], identity: Identity) -> None:
    different = [name for name, value in identity.shape.items() if shape.get(name) != value]
    if different:
        _reject(origin, f"{', '.join(different)} differ from the model's")


def _reject(origin: Origin, problem: str) -> NoReturn:
    raise ConfigError(f"{origin.path}: {problem}", field=FIELD)
