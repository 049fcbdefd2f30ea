"""Raw texts of samples: prompts and completions as the model sees them, special tokens included. It runs in a child process."""

from __future__ import annotations

from services.common.config.settings import Settings
from services.common.errors import ModelError, PromptError
from services.common.models.directory import resolve_model
from services.common.models.prompts import PromptEncoder
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec


def decode(spec: str, settings: dict[str, object], sequences: list[list[int]]) -> list[str]:
    """The texts of token ids by the tokenizer of a recorded job, `spec` as JSON; `settings` as `Settings.public` gives them.

    Raises:
        ModelError: the model is not there any more, or its tokenizer cannot be loaded or refuses them.
    """
    job = JobSpec.model_validate_json(spec, context=RECORDED)
    model_dir = resolve_model(job.model.path, Settings.model_validate(settings))
    try:
        return PromptEncoder(model_dir, job.model.chat_template).decode_raw(sequences)
    except PromptError as error:
        raise ModelError(str(error), field="model.path") from error
