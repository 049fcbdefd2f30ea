"""Filter of a source's tasks: those whose prompts leave room for a response of full length (`data.filter_overlong_prompts`).

source ──► every prompt's tokens, counted once and kept below <home>/cache ──► the tasks that fit, in the source's order
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.checkpoints.fingerprint import text_digest
from services.common.config.settings import Settings
from services.common.data.record import TaskRecord, TaskSource
from services.common.durable import write_durably
from services.common.errors import DataError, PromptError
from services.common.models.directory import inspect_model, resolve_model
from services.common.models.prompts import CHARACTERS_PER_TOKEN, PromptEncoder, prepare
from services.common.spec.job import JobSpec

log = logging.getLogger(__name__)

_BLOCK = 4096
"""Tasks that the source is told to expect."""

Indices = npt.NDArray[np.uint32]


class FittingTasks:
    """The tasks of a source whose prompts fit, as a source."""

    def __init__(self, source: TaskSource, kept: Indices) -> None:
        """`kept`: indices in the source, ascending, uint32 [tasks that fit]."""
        self._source, self._kept = source, kept
        digest = hashlib.blake2b(source.fingerprint.encode(), digest_size=16)
        digest.update(kept.tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> TaskRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of a dataset of {len(self)}")
        return self._source[int(self._kept[index])]

    def expect(self, indices: Sequence[int]) -> None:
        """Names the tasks that are read next, in their order."""
        self._source.expect(self._kept[np.asarray(indices, np.int64)].tolist())


def fitting(source: TaskSource, spec: JobSpec, settings: Settings, *, field: str) -> FittingTasks:
    """The tasks of the source that fit; the log says how many do not. Tasks that the chat template refuses do not, either.

    Raises:
        DataError: none fits; names the field.
        ModelError: the model's tokenizer cannot be used.
    """
    model_dir = resolve_model(spec.model.path, settings)
    context = spec.model.max_model_len or inspect_model(model_dir).max_position_embeddings
    room = context - spec.rollout.rollout_max_tokens
    parts = (source.fingerprint, text_digest(model_dir), spec.model.chat_template or "", str(room))
    key = hashlib.blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()
    cache = settings.home / "cache" / "prompts" / f"{key}.npy"
    kept = _read(cache, len(source))
    if kept is None:
        prepare()
        kept = _count(source, PromptEncoder(model_dir, spec.model.chat_template), context, room)
        _write(cache, kept)
    if not len(kept):
        raise DataError(f"no prompt has at most {room} tokens, for which the context has room", field=field)
    if dropped := len(source) - len(kept):
        log.info(
            "%s: %d of %d tasks are dropped: their prompts have more than %d tokens", field, dropped, len(source), room
        )
    return FittingTasks(source, kept)


def _count(source: TaskSource, encoder: PromptEncoder, context: int, room: int) -> Indices:
    kept = []
    for index in range(len(source)):
        if index % _BLOCK == 0:
            source.expect(range(index, min(index + _BLOCK, len(source))))
        if _fits(source, index, encoder, context, room):
            kept.append(index)
    return np.array(kept, np.uint32)


def _fits(source: TaskSource, index: int, encoder: PromptEncoder, context: int, room: int) -> bool:
    """Whether the task is kept; one that cannot be made is, and says why when it is drawn."""
    try:
        messages = [(message.role, message.content) for message in source[index].prompt]
    except DataError:
        return True
    try:
        return len(encoder.encode(messages, CHARACTERS_PER_TOKEN * context)) <= room
    except PromptError:
        return False


def _read(cache: Path, tasks: int) -> Indices | None:
    """What was counted before; None where it was not, or cannot be used."""
    try:
        kept = np.load(io.BytesIO(cache.read_bytes()), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    ascends = kept.ndim == 1 and kept.dtype == np.uint32 and bool(np.all(kept[1:] > kept[:-1]))
    return kept if ascends and (not len(kept) or kept[-1] < tasks) else None


def _write(cache: Path, kept: Indices) -> None:
    content = io.BytesIO()
    np.save(content, kept, allow_pickle=False)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_durably(cache, content.getvalue())
    except OSError as error:
        log.warning("the count of prompts is not kept for the next start: %s", error)
