"""Trial of a model directory: what engine and ranks will load is loaded here first, where it can be killed.

    config.json ──► tokenizer ──► chat template ──► encode, decode ──► weight headers ──► values, as far as the time allows

It needs transformers and safetensors but no torch, and takes what time, memory and output a hostile directory makes it take: run it in a
child process with limits. Its own bounds are there for the better message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar

from services.common.errors import ModelError
from services.common.models.config import check_trainable
from services.common.models.directory import FIELD, ModelInfo, inspect_model, read_json
from services.common.models.weight_files import check_weights

MAX_TEXT_BYTES = 128 * 1024 * 1024
"""Of a file that the tokenizer may be made of; the largest known have 34 MB."""
MAX_RENDERED_CHARS = 262_144
"""What a chat template may make of the trial's conversation."""
PROMPT = "What is 2 + 3?"
SYSTEM = "Answer with a number."

_TEXTS = frozenset({".json", ".jinja", ".txt", ".model"})
_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Engines choose by the architecture, ranks by the model_type."""

T = TypeVar("T")


class ModelFacts(TypedDict):
    """What the trial has found, as MessagePack values."""

    shape: dict[str, Any]
    """Fields of ModelInfo."""
    vocabulary: int
    """Entries of the tokenizer, all below the model's vocab_size."""
    takes_system: bool
    """Whether the chat template takes a system message."""
    tensors: int
    parameters: int
    weight_bytes: int
    looked_bytes: int
    """Bytes of values that were looked at, and are finite."""
    all_looked: bool


def try_model(path: str, until: float) -> ModelFacts:
    """Loads what a model directory has, once.

    Args:
        path: the directory, as `resolve_model` gives it.
        until: when to stop looking at values, monotonic seconds; the rest is always done.

    Raises:
        ModelError: `model.path: <file>: what is wrong`.
    """
    folder = Path(path)
    info = inspect_model(folder)
    _check_files(folder)
    config = _check_config(folder, info)
    tokenizer = _load_tokenizer(folder)
    vocabulary = _check_vocabulary(folder, tokenizer, info)
    takes_system = _check_template(folder, tokenizer, info)
    looked = check_weights(folder, info, config, until)
    return ModelFacts(
        shape=asdict(info),
        vocabulary=vocabulary,
        takes_system=takes_system,
        tensors=looked.tensors,
        parameters=looked.parameters,
        weight_bytes=looked.of_bytes,
        looked_bytes=looked.bytes,
        all_looked=looked.all,
    )


def _check_files(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in _TEXTS and file.is_file() and file.stat().st_size > MAX_TEXT_BYTES:
            _wrong(file, f"is larger than {MAX_TEXT_BYTES} bytes")


def _check_config(folder: Path, info: ModelInfo) -> dict[str, Any]:
    """The content of config.json, once transformers has made a configuration of it."""
    file = folder / "config.json"
    config = read_json(file)
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            _wrong(file, f"{key} is {value}")
    head_dim = config.get("head_dim")
    if head_dim is not None and (type(head_dim) is not int or not 0 < head_dim <= info.hidden_size * 64):
        _wrong(file, f"head_dim must be a positive integer, not {head_dim!r}")
    eps = config.get("rms_norm_eps")
    if eps is not None and (type(eps) not in {int, float} or eps <= 0):
        _wrong(file, f"rms_norm_eps must be a positive number, not {eps!r}")
    _check_end_tokens(file, config, info)
    from transformers import AutoConfig

    made = _tried(file, lambda: AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    wanted = _MODEL_TYPES[info.architecture]
    if made.model_type != wanted:
        _wrong(file, f"model_type is {made.model_type!r}, and {info.architecture} is {wanted!r}")
    _tried(file, lambda: check_trainable(made, str(file), field=FIELD))
    generation = folder / "generation_config.json"
    if generation.is_file():
        from transformers import GenerationConfig

        _check_end_tokens(generation, read_json(generation), info)
        _tried(generation, lambda: GenerationConfig.from_pretrained(folder, local_files_only=True))
    return config


def _check_end_tokens(file: Path, config: Mapping[str, Any], info: ModelInfo) -> None:
    found = config.get("eos_token_id")
    for token in found if isinstance(found, list) else [found]:
        if token is not None and (type(token) is not int or not 0 <= token < info.vocab_size):
            _wrong(file, f"eos_token_id {token!r} is not one of the model's {info.vocab_size} tokens")


def _load_tokenizer(folder: Path) -> Any:  # noqa: ANN401  transformers comes without types
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  as in _tried
        _blame_core(folder / "tokenizer.json")
        _wrong(folder, f"the tokenizer cannot be loaded: {_line(error)}", error)


def _blame_core(file: Path) -> None:
    """Names tokenizer.json where that alone is what cannot be loaded."""
    if file.is_file():
        from tokenizers import Tokenizer

        _tried(file, lambda: Tokenizer.from_file(str(file)))


def _check_vocabulary(folder: Path, tokenizer: Any, info: ModelInfo) -> int:  # noqa: ANN401
    """The number of the tokenizer's entries."""
    entries: dict[str, int] = _tried(folder, tokenizer.get_vocab)
    if not entries:
        _wrong(folder, "the tokenizer knows no token")
    token, highest = max(entries.items(), key=lambda entry: entry[1])
    if highest >= info.vocab_size or min(entries.values()) < 0:
        _wrong(
            folder,
            f"the tokenizer's token {token[:40]!r} is number {highest}, and the model has {info.vocab_size} tokens",
        )
    return len(entries)


def _check_template(folder: Path, tokenizer: Any, info: ModelInfo) -> bool:  # noqa: ANN401
    """Whether the template takes a system message. It must take a prompt with one, or without one."""
    user = {"role": "user", "content": PROMPT}
    problems: list[ModelError] = []
    for messages in ([user], [{"role": "system", "content": SYSTEM}, user]):
        try:
            _check_rendered(folder, tokenizer, info, messages)
        except ModelError as error:
            problems.append(error)
            takes_system = False
        else:
            takes_system = len(messages) > 1
    if len(problems) > 1:
        raise problems[0]
    return takes_system


def _check_rendered(folder: Path, tokenizer: Any, info: ModelInfo, messages: list[dict[str, str]]) -> None:  # noqa: ANN401
    file = folder / "chat_template.jinja"
    if not file.is_file():
        file = folder / "tokenizer_config.json"
    text = _tried(
        file,
        lambda: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "the chat template",
    )
    if not isinstance(text, str) or len(text) > MAX_RENDERED_CHARS:
        length = len(text) if isinstance(text, str) else 0
        _wrong(
            file,
            f"the chat template makes {length} characters of a short prompt; at most {MAX_RENDERED_CHARS} are taken",
        )
    token_ids = _tried(folder, lambda: list(tokenizer(text, add_special_tokens=False)["input_ids"]), "the tokenizer")
    if not token_ids:
        _wrong(file, "the chat template makes a prompt without tokens")
    if not all(type(token) is int and 0 <= token < info.vocab_size for token in token_ids):
        _wrong(folder, f"the tokenizer makes tokens that are not among the model's {info.vocab_size}")
    _tried(folder, lambda: tokenizer.batch_decode([token_ids], skip_special_tokens=True), "the tokenizer")


def _tried(file: Path, action: Callable[[], T], what: str = "") -> T:
    """What the action gives; whatever it raises is the file's fault, panics of Rust (no `Exception`) and too little memory included."""
    try:
        return action()
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001
        _wrong(file, f"{what}{' fails: ' if what else ''}{_line(error)}", error)


def _line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def _wrong(file: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    raise ModelError(f"{file}: {what}", field=FIELD) from cause
