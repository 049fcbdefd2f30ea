"""Trial of a reward model's directory: a sequence classifier with one output, before a process loads it.

    files ──► config.json ──► tokenizer, chat template ──► weight headers ──► values, as far as the time allows

It needs transformers and safetensors but no torch, as the trial of a policy (services/common/models/trial.py), and runs in a child too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.models.directory import (
    check_chat_template,
    check_files,
    check_tokenizer_files,
    read_json,
    read_size,
    reject,
)
from services.common.models.trial import attempt, check_text_sizes, check_tokenizer
from services.common.models.weight_files import check_values, read_headers

SUFFIX = "ForSequenceClassification"


def check_classifier(path: str, until: float) -> None:
    """Loads the parts of a directory (from `resolve_model`) once; checks values until `until`, monotonic seconds, the rest always.

    Raises:
        ModelError: `model.path: <file>: what is wrong`; `services.common.models.roles.naming` gives it another field.
    """
    folder = Path(path)
    check_files(folder)
    check_tokenizer_files(folder)
    check_chat_template(folder)
    check_text_sizes(folder)
    check_tokenizer(folder, _vocab_size(folder / "config.json"))
    tensors = read_headers(folder)
    if not any(len(tensor.shape) == 2 and tensor.shape[0] == 1 for tensor in tensors.values()):
        reject(folder, "has no head with one output: no weight has the shape [1, …]")
    check_values(tensors.values(), until)


def _vocab_size(file: Path) -> int:
    """Size of the vocabulary of a config.json that describes a reward model. Raises ModelError for any other."""
    config = read_json(file)
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if len(names) != 1 or not str(names[0]).endswith(SUFFIX):
        reject(file, f"architectures {repr(architectures)[:200]} is no reward model: one …{SUFFIX} is needed")
    if config.get("quantization_config") is not None:
        reject(file, "quantized weights (`quantization_config`) are not loaded")
    labels = attempt(file, lambda: _labels(file.parent, str(names[0])))
    if labels != 1:
        reject(file, f"the classifier has {labels} labels (`id2label`, `num_labels`): a reward model has one")
    return read_size(file, config, "vocab_size")


def _labels(folder: Path, architecture: str) -> int:
    """Outputs of the classifier, as transformers understands config.json. Raises ModelError for an architecture that it does not know."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    made: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(made.model_type) != architecture:
        reject(folder / "config.json", f"model_type {made.model_type!r} has no {architecture}")
    return int(made.num_labels)
