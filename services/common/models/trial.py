"""Trial of a model directory: what engine and ranks load later is loaded here first, in a process that can be killed.

    config.json ──► tokenizer ──► chat template ──► encode, decode ──► weight headers ──► values, as far as the time allows

It needs transformers and safetensors but no torch. A hostile directory determines its time, memory and output: run it in a child process
with limits. Its own bounds give the better message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

from services.common.errors import ModelError
from services.common.models.config import check_rope_numbers, check_trainable
from services.common.models.directory import FIELD, ModelInfo, check_chat_template, inspect_model, read_json, reject
from services.common.models.prompts import PromptEncoder
from services.common.models.weight_files import check_weights

MAX_TEXT_BYTES = 128 * 1024 * 1024
"""Of a file of the tokenizer; the largest known have 34 MB."""
MAX_RENDERED_CHARS = 262_144
"""Of the text that the chat template makes of the trial's conversation."""
PROMPT = "What is 2 + 3?"
SYSTEM = "Answer with a number."

_TEXTS = frozenset({".json", ".jinja", ".txt", ".model"})
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}
"""Engines choose the model class by the architecture, ranks by the model_type."""

_GIVE_ONE = "; model.chat_template of the job gives one"

ROLES = ("user", "tool")
"""Of messages that answer the policy."""

T = TypeVar("T")


class ModelFacts(TypedDict):
    """Results of the trial, as MessagePack values."""

    shape: dict[str, Any]
    """Fields of ModelInfo."""
    vocabulary: int
    """Entries of the tokenizer, all below the model's vocab_size."""
    takes_system: bool
    """Whether the chat template takes a system message."""
    tensors: int
    parameters: int
    weight_bytes: int
    checked_bytes: int
    """Bytes of values that were checked, and are finite."""
    all_checked: bool
    unfit_for_megatron: str
    """Why Megatron would train it wrongly; empty if it does not, or does not know the architecture."""


def check_model(path: str, until: float, chat_template: str | None = None) -> ModelFacts:
    """Loads the parts of a model directory (from `resolve_model`) once; checks values until `until`, monotonic seconds, the rest always.

    `chat_template`: in place of the directory's own, which it then need not have.

    Raises:
        ModelError: `model.path: <file>: what is wrong`.
    """
    folder = Path(path)
    info = inspect_model(folder)
    if chat_template is None:
        check_chat_template(folder, _GIVE_ONE)
    check_text_sizes(folder)
    config = _check_config(folder, info)
    vocabulary, takes_system = check_tokenizer(folder, info.vocab_size, chat_template)
    scan = check_weights(folder, info, config.content, until)
    return ModelFacts(
        shape=asdict(info),
        vocabulary=vocabulary,
        takes_system=takes_system,
        tensors=scan.tensors,
        parameters=scan.parameters,
        weight_bytes=scan.of_bytes,
        checked_bytes=scan.bytes,
        all_checked=scan.all,
        unfit_for_megatron=config.unfit_for_megatron,
    )


def check_text_sizes(folder: Path) -> None:
    """No file of the tokenizer is larger than MAX_TEXT_BYTES. Raises ModelError."""
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in _TEXTS and file.is_file() and file.stat().st_size > MAX_TEXT_BYTES:
            reject(file, f"is larger than {MAX_TEXT_BYTES} bytes")


def check_tokenizer(folder: Path, vocab_size: int, chat_template: str | None = None) -> tuple[int, bool]:
    """The entries of the tokenizer, and whether the chat template takes a system message; it makes tokens below `vocab_size` only.

    `chat_template`: as of `check_model`.

    Raises:
        ModelError: names the file.
    """
    tokenizer = _load_tokenizer(folder)
    file = folder / "chat_template.jinja"
    if chat_template is not None:
        tokenizer.chat_template, file = chat_template, Path("model.chat_template")
    elif not file.is_file():
        file = folder / "tokenizer_config.json"
    return _check_vocabulary(folder, tokenizer, vocab_size), _check_template(file, folder, tokenizer, vocab_size)


def check_turns(folder: Path, chat_template: str | None = None) -> None:
    """The model can take turns: its transcripts only grow, and the engine ends a turn where the template does.

    `chat_template`: as of `check_model`, which has accepted the directory. Raises ModelError, which names the folder.
    """
    encoder = PromptEncoder(folder, chat_template)
    encoder.check_append_only(str(folder), ROLES)
    if encoder.end_of_turn not in (ends := end_tokens(folder) | encoder.end_tokens):
        closing = encoder.decode_raw([[encoder.end_of_turn]])[0]
        closes = f"the chat template closes a turn with {closing!r}, token {encoder.end_of_turn}"
        reject(
            folder,
            f"{closes}, and the engine stops at {sorted(ends)}: eos_token_id of generation_config.json must have it",
        )


def end_tokens(folder: Path) -> set[int]:
    """Tokens at which the engine stops: of generation_config.json, or where there is none of config.json."""
    generation = folder / "generation_config.json"
    found = read_json(generation if generation.is_file() else folder / "config.json").get("eos_token_id")
    return {token for token in (found if isinstance(found, list) else [found]) if token is not None}


class _Config(NamedTuple):
    content: dict[str, Any]
    """Of config.json."""
    unfit_for_megatron: str


def _check_config(folder: Path, info: ModelInfo) -> _Config:
    """The configuration, once transformers has accepted it."""
    file = folder / "config.json"
    config = read_json(file)
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            reject(file, f"{key} is {value}")
    head_dim = config.get("head_dim")
    if head_dim is not None and (type(head_dim) is not int or not 0 < head_dim <= info.hidden_size * 64):
        reject(file, f"head_dim must be a positive integer, not {head_dim!r}")
    eps = config.get("rms_norm_eps")
    if eps is not None and (type(eps) not in {int, float} or eps <= 0):
        reject(file, f"rms_norm_eps must be a positive number, not {eps!r}")
    _check_end_tokens(file, config, info)
    from transformers import AutoConfig

    made = attempt(file, lambda: AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    wanted = _MODEL_TYPES.get(info.architecture, made.model_type)
    if made.model_type != wanted:
        reject(file, f"model_type is {made.model_type!r}, and {info.architecture} is {wanted!r}")
    attempt(file, lambda: check_rope_numbers(made, str(file), field=FIELD))
    unfit = _unfit_for_megatron(file, made) if info.architecture in _MODEL_TYPES else ""
    generation = folder / "generation_config.json"
    if generation.is_file():
        from transformers import GenerationConfig

        _check_end_tokens(generation, read_json(generation), info)
        attempt(generation, lambda: GenerationConfig.from_pretrained(folder, local_files_only=True))
    return _Config(config, unfit)


def _unfit_for_megatron(file: Path, made: Any) -> str:  # noqa: ANN401  transformers comes without types
    try:
        attempt(file, lambda: check_trainable(made, str(file)))
    except ModelError as error:
        return str(error)
    return ""


def _check_end_tokens(file: Path, config: Mapping[str, Any], info: ModelInfo) -> None:
    found = config.get("eos_token_id")
    for token in found if isinstance(found, list) else [found]:
        if token is not None and (type(token) is not int or not 0 <= token < info.vocab_size):
            reject(file, f"eos_token_id {token!r} is not one of the model's {info.vocab_size} tokens")


def _load_tokenizer(folder: Path) -> Any:  # noqa: ANN401  transformers comes without types
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  as in attempt
        file = folder / "tokenizer.json"
        if file.is_file():  # the error names this file if it cannot be loaded on its own
            from tokenizers import Tokenizer

            attempt(file, lambda: Tokenizer.from_file(str(file)))
        reject(folder, f"the tokenizer cannot be loaded: {_describe(error)}", error)


def _check_vocabulary(folder: Path, tokenizer: Any, vocab_size: int) -> int:  # noqa: ANN401
    """The number of the tokenizer's entries."""
    entries: dict[str, int] = attempt(folder, tokenizer.get_vocab)
    if not entries:
        reject(folder, "the tokenizer knows no token")
    token, highest = max(entries.items(), key=lambda entry: entry[1])
    if highest >= vocab_size or min(entries.values()) < 0:
        reject(
            folder, f"the tokenizer's token {token[:40]!r} is number {highest}, and the model has {vocab_size} tokens"
        )
    return len(entries)


def _check_template(file: Path, folder: Path, tokenizer: Any, vocab_size: int) -> bool:  # noqa: ANN401
    """Whether the template, which is in this file, takes a system message. It must take a prompt with one, or without."""
    user = {"role": "user", "content": PROMPT}
    try:
        _check_rendered(file, folder, tokenizer, vocab_size, [{"role": "system", "content": SYSTEM}, user])
    except ModelError:
        _check_rendered(file, folder, tokenizer, vocab_size, [user])
        return False
    return True


def _check_rendered(
    file: Path,
    folder: Path,
    tokenizer: Any,  # noqa: ANN401
    vocab_size: int,
    messages: list[dict[str, str]],
) -> None:
    render = partial(tokenizer.apply_chat_template, messages, tokenize=False, add_generation_prompt=True)
    text = attempt(file, render, "the chat template")
    if not isinstance(text, str) or len(text) > MAX_RENDERED_CHARS:
        made = f"{len(text) if isinstance(text, str) else 0} characters of a short prompt"
        reject(file, f"the chat template makes {made}; at most {MAX_RENDERED_CHARS} are taken")
    token_ids = attempt(folder, lambda: list(tokenizer(text, add_special_tokens=False)["input_ids"]), "the tokenizer")
    if not token_ids:
        reject(file, "the chat template makes a prompt without tokens")
    if not all(type(token) is int and 0 <= token < vocab_size for token in token_ids):
        reject(folder, f"the tokenizer makes tokens that are not among the model's {vocab_size}")
    attempt(folder, lambda: tokenizer.batch_decode([token_ids], skip_special_tokens=True), "the tokenizer")


def attempt(file: Path, action: Callable[[], T], part: str = "") -> T:
    """The action's result; whatever it raises is the file's fault, also a panic of Rust (not an `Exception`) or a lack of memory."""
    try:
        return action()
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001
        reject(file, f"{part}{' fails: ' if part else ''}{_describe(error)}", error)


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
