"""Checks of a body, and of a new job's model and data: they run in a child process that may be killed at any moment.

The files that a job names are opened here for the first time, with the same functions as in the learner.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.checkpoints.origin import OriginFacts, check_new_origin
from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.data.reasoning_gym import import_reasoning_gym
from services.common.data.source import data_roots
from services.common.data.trial import SourceFacts, check_source
from services.common.errors import ConfigError
from services.common.models.classifier import check_classifier
from services.common.models.directory import ModelInfo, check_backend, check_parallel_sizes, resolve_model
from services.common.models.roles import check_role, named_models, naming
from services.common.models.trial import ModelFacts, check_model, check_turns
from services.common.spec.data import DataSourceSpec
from services.common.spec.job import JobSpec
from services.gateway.admission.preview import Preview, preview
from services.gateway.admission.spec_body import parse_body

MARGIN_S = 1.0
"""Time that remains when the check of a large file stops reading."""


def prepare() -> None:
    """Imports the checks' dependencies in the forkserver; torch is blocked, even if installed: it starts threads and takes much memory."""
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1"}
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    with contextlib.suppress(ImportError):
        import_reasoning_gym()
    with contextlib.suppress(ImportError):
        from transformers import AutoTokenizer  # noqa: F401


def read_body(body: bytes, media_type: str) -> str:
    """The spec in a request's body as JSON. Raises ConfigError, which names every wrong field."""
    return parse_body(body, media_type).model_dump_json()


class JobChecks:
    """The checks of one spec. Each raises ConfigError with `field: message` lines."""

    def __init__(self, spec: str, settings: dict[str, Any]) -> None:
        """Parses the spec, which is JSON; opens no file. `settings`: `Settings.public` of the gateway."""
        self._spec = JobSpec.model_validate_json(spec)
        self._settings = Settings(**settings)
        self._model_dir: Path | None = None
        self._actor: ModelFacts | None = None
        self._dataset = ""

    def model(self, seconds: float) -> ModelFacts:
        """The model exists, is complete and safe, fits the parallel sizes, and the values read in half of the time are finite."""
        with _readable("model.path"):
            path = resolve_model(self._spec.model.path, self._settings)
            facts = check_model(str(path), time.monotonic() + seconds / 2, self._spec.model.chat_template)
            check_backend(ModelInfo(**facts["shape"]), facts["unfit_for_megatron"], self._spec)
            check_parallel_sizes(ModelInfo(**facts["shape"]), self._spec)
        self._model_dir, self._actor = path, facts
        return facts

    def turns(self) -> None:
        """The model can take turns with an environment."""
        with _readable("model.path"):
            check_turns(resolve_model(self._spec.model.path, self._settings), self._spec.model.chat_template)

    def role(self, role: str, seconds: float) -> ModelFacts:
        """The same of the model that a role's section names, which must also take the actor's tokens; that is known once `model` passed."""
        field = f"{role}.path"
        with _readable(field), naming(field):
            path = resolve_model(named_models(self._spec)[role], self._settings)
            if path == self._model_dir and self._actor is not None:
                return self._actor
            facts = check_model(str(path), time.monotonic() + seconds / 2, self._spec.model.chat_template)
            actor = None if self._actor is None else ModelInfo(**self._actor["shape"])
            check_backend(ModelInfo(**facts["shape"]), facts["unfit_for_megatron"], self._spec)
            check_role(role, ModelInfo(**facts["shape"]), actor, self._spec)
        return facts

    def reward_model(self, name: str, seconds: float) -> None:
        """The directory of `reward.reward_models.<name>` has a reward model; the values read in half of the time are finite."""
        field = f"reward.reward_models.{name}.path"
        with _readable(field), naming(field):
            path = resolve_model(self._spec.reward.reward_models[name].path, self._settings)
            check_classifier(str(path), time.monotonic() + seconds / 2)

    def data(self, section: str, seconds: float) -> SourceFacts:
        """The source of `data.<section>` opens, and the tasks read within this time are well formed."""
        source: DataSourceSpec = getattr(self._spec.data, section)
        roots = [str(root) for root in data_roots(self._settings)]
        bounds, until = asdict(DataBounds.of(self._settings)), time.monotonic() + seconds - MARGIN_S
        with _readable(f"data.{section}.source"):
            facts = check_source(source.model_dump(), roots, bounds, f"data.{section}", until)
        if section == "train":
            self._dataset = facts["fingerprint"]
        return facts

    def preview(self, section: str, seconds: float) -> Preview:
        """The prompts of `data.<section>` as the model will see them, as many as can be counted within this time."""
        with _readable(f"data.{section}.source"):
            model_dir = resolve_model(self._spec.model.path, self._settings)
            return preview(self._spec, self._settings, model_dir, section, time.monotonic() + seconds)

    def load(self, seconds: float) -> OriginFacts | None:
        """The checkpoint of `checkpoint.load` exists and belongs to such a job. None unless `model` has accepted the model before."""
        if self._model_dir is None:
            return None
        until = time.monotonic() + seconds - MARGIN_S
        with _readable("checkpoint.load"):
            return check_new_origin(self._spec, self._settings, self._model_dir, self._dataset, until)


@contextlib.contextmanager
def _readable(field: str) -> Iterator[None]:
    """Reports a file that cannot be read as a problem of the field."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", field=field) from error
