"""Classifier: a reward model in its own process, which may be killed at any moment. Runs no code of the model's directory.

    messages, response ── chat template ──► text ── tokenizer ──► row of token ids ── padded micro-batches ──► one number a row

Whatever tokenizer, template and libraries raise becomes an error with a readable reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config.settings import Platform, Settings
from services.common.errors import ModelError
from services.common.models.classifier import check_classifier
from services.common.models.directory import resolve_model
from services.common.models.roles import naming
from services.common.spec.scorers import RewardModelSpec
from services.reward.reward_model.padding import micro_batches

Messages = Sequence[tuple[str, str]]
"""Role and content of each message."""

MAX_CHARS = 4_194_304
"""Of a conversation after the chat template; a longer one is not tokenized."""
CHECK_S = 30.0
"""For the search for values that are not finite, before the model is loaded."""


def prepare() -> None:
    """Imports torch and transformers in the forkserver, so that a model's process, and the one that replaces it, start warm."""
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1"}
    import torch  # noqa: F401
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401  lazy names


@dataclass(frozen=True, slots=True)
class _Loaded:
    tokenizer: Any
    model: Any
    device: Any
    pad: int | None
    """Token that fills up rows; None: rows of different lengths are not computed together."""
    most_tokens: int
    """Longest row."""


class Classifier:
    """A loaded reward model. Arguments and results of its methods are MessagePack values."""

    def __init__(self, spec: str, settings: dict[str, Any], platform: str, threads: int) -> None:
        """Checks and loads the model. `spec`: RewardModelSpec as JSON; `settings`: `Settings.public` of the service.

        Raises:
            ModelError: the directory is missing, unsafe, damaged, or no reward model.
        """
        self._spec = RewardModelSpec.model_validate_json(spec)
        with naming("path"):
            folder = resolve_model(self._spec.path, Settings(**settings))
            check_classifier(str(folder), time.monotonic() + CHECK_S)
        self._loaded = _load(folder, self._spec, Platform(platform), threads)

    def encode(self, prompt: Messages, responses: Sequence[str]) -> list[tuple[list[int] | None, str]]:
        """The row of each response with the prompt before it, and what is to be said of it; or None and the reason."""
        return [self._encode([*prompt, ("assistant", response)]) for response in responses]

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The model's number for each row, perhaps not finite."""
        import torch

        most_rows = None if self._loaded.pad is not None else 1
        scores = [0.0] * len(rows)
        with torch.inference_mode():
            for batch in micro_batches([len(row) for row in rows], self._spec.batch_tokens, most_rows=most_rows):
                for index, score in zip(batch, self._forward([rows[index] for index in batch]), strict=True):
                    scores[index] = score
        return scores

    def _encode(self, chat: Messages) -> tuple[list[int] | None, str]:
        tokenizer, messages = self._loaded.tokenizer, [{"role": role, "content": content} for role, content in chat]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
            if len(text) > MAX_CHARS:
                return None, f"the chat template makes {len(text)} characters; at most {MAX_CHARS} are taken"
            row = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code; a panic of tokenizers is no Exception
            return None, f"the reward model's tokenizer refuses the conversation: {type(error).__name__}: {error}"
        if not row:
            return None, "the conversation has no tokens"
        most = self._loaded.most_tokens
        return row[-most:], "" if len(row) <= most else f"the last {most} of {len(row)} tokens"

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        width, pad = max(map(len, rows)), self._loaded.pad or 0
        tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self._loaded.device
        logits = self._loaded.model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits
        return [float(score) for score in logits[:, 0].float().cpu().tolist()]


def _load(folder: Path, spec: RewardModelSpec, platform: Platform, threads: int) -> _Loaded:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from services.reward.reward_model.platform import dtype_of, prepare

    device = prepare(platform, threads)
    options = {"local_files_only": True, "trust_remote_code": False}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype_of(spec.dtype, platform), use_safetensors=True, output_loading_info=True, **options
        )
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"{folder}: cannot be loaded: {type(error).__name__}: {error}") from error
    if wrong := sorted(report["missing_keys"]) or sorted(map(str, report["mismatched_keys"])):
        raise ModelError(f"{folder}: its weights lack {', '.join(wrong[:5])}: what would be scored is chance")
    model.eval().to(device)
    positions = getattr(model.config, "max_position_embeddings", None) or spec.max_tokens
    return _Loaded(tokenizer, model, device, _pad_token(model, tokenizer), min(spec.max_tokens, positions))


def _pad_token(model: Any, tokenizer: Any) -> int | None:  # noqa: ANN401  transformers comes without types
    """The token for padding. Classifiers score the last token that is another one, so that it may not end a conversation.

    A model that names it in its config was trained and is used so elsewhere.
    """
    if model.config.pad_token_id is not None:
        return int(model.config.pad_token_id)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        return None
    model.config.pad_token_id = tokenizer.pad_token_id
    return int(tokenizer.pad_token_id)
