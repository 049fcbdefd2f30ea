"""Model directories: their location, their content, and whether a job's sizes fit. Reads JSON only, loads no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from services.common.config.hub_folder import relative_path
from services.common.config.paths import is_below, locate, resolve
from services.common.config.settings import Settings
from services.common.errors import ModelError, Problem, did_you_mean
from services.common.spec.job import JobSpec
from services.common.spec.learner import BackendName
from services.common.spec.reference import is_reference, parse_reference

FIELD = "model.path"
ON_MEGATRON = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")
"""Architectures that have a bridge to Megatron; backend fsdp2 takes those of transformers."""
_CAUSAL = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}ForCausalLM")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 32 * 1024 * 1024
MAX_SIZE = 2**31
"""Upper bound of every size in config.json."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_NAME = re.compile(rf"{_NAME.pattern}/{_NAME.pattern}")
_MADE = {
    "tiny": "`millrace models tiny` makes it",
    "smollm2-135m-instruct": "`millrace models smollm2` makes it",
}
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"})
_CODE = frozenset({".py", ".pyc", ".so"})


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Shape of a model, from its config.json.

    Example: ModelInfo("LlamaForCausalLM", num_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576,
    intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
    """

    architecture: str
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward layers."""
    vocab_size: int
    max_position_embeddings: int
    """Longest prompt + response, tokens."""
    tie_word_embeddings: bool
    num_experts: int = 0
    """Of each layer of a mixture of experts; 0 for a dense model."""
    expert_intermediate_size: int = 0
    """Width of an expert."""

    def described(self) -> dict[str, Any]:
        """The fields; those of experts only where there are any, as in all releases."""
        experts = ("num_experts", "expert_intermediate_size")
        return {name: value for name, value in asdict(self).items() if self.num_experts or name not in experts}


def resolve_model(name_or_path: str, settings: Settings) -> Path:
    """The directory of a registered model (below `settings.models_dir`), of a path under that or `settings.model_roots`, or of a hub's.

    Raises:
        ModelError: it does not exist, it or a file in it leads outside the allowed directories, or it is not fetched.
    """
    roots = [settings.models_dir, *settings.model_roots]
    if is_reference(name_or_path):
        roots, name_or_path = [settings.hub_folder.roots[0]], _fetched(name_or_path, settings)
    path = locate(name_or_path, roots, field=FIELD, error=ModelError)
    if not path.is_dir():
        raise ModelError(_not_there(name_or_path, path, settings), field=FIELD)
    real_roots = [root.resolve() for root in roots]
    for file in _files(path):
        if file.is_symlink() and not is_below(resolve(file, field=FIELD, error=ModelError), real_roots):
            raise ModelError(f"{file} is a link that leads outside the allowed directories", field=FIELD)
    return path


def _not_there(name: str, path: Path, settings: Settings) -> str:
    """What is wrong, and what helps."""
    if _NAME.fullmatch(name):
        known = sorted(file.parent.name for file in settings.models_dir.glob("*/config.json") if file.is_file())
        hint = did_you_mean(name, known) or f"; {_MADE.get(name, '`millrace models add DIR` registers one')}"
        return f"there is no model {name!r} in {settings.models_dir} (registered: {', '.join(known) or 'none'}){hint}"
    hint = f"; if it is a hub's, write hf:{name} or modelscope:{name}" if _HUB_NAME.fullmatch(name) else ""
    return f"{path} is not a directory{hint}"


def _fetched(text: str, settings: Settings) -> str:
    """The path, below its root, of a hub's model, which must be complete."""
    try:
        reference = parse_reference(text, file=False)
    except ValueError as error:
        raise ModelError(str(error), field=FIELD) from error
    if not settings.hub_folder.is_complete(reference):
        raise ModelError(f"{text} is not there: fetch it with `millrace models pull {text}`", field=FIELD)
    return str(relative_path(reference))


def inspect_config(path: Path) -> ModelInfo:
    """The shape of a model whose weights need not be there yet. Raises ModelError as `inspect_model`."""
    _reject_code(path)
    return read_shape(path / "config.json")


def inspect_model(path: Path) -> ModelInfo:
    """The shape of a model, once its directory is known to be complete, safe and of a supported architecture.

    Raises:
        ModelError: names `model.path`, the file and the problem: code or pickles, no safetensors, a missing shard, an unsupported
            architecture, no tokenizer, a missing size.
    """
    check_files(path)
    info = read_shape(path / "config.json")
    check_tokenizer_files(path)
    return info


def check_files(path: Path) -> None:
    """The directory has a config.json and whole safetensors files, and neither code nor pickles. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory", field=FIELD)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelError(f"{config_path} is missing: not a Hugging Face model directory", field=FIELD)
    _reject_code(path)
    _check_weights(path)


def check_parallel_sizes(info: ModelInfo, spec: JobSpec) -> None:
    """Checks that model and spec agree on splits and lengths. Raises ModelError, with a line for each wrong setting."""
    if problems := [*_size_problems(info, spec)]:
        raise ModelError(*problems)


def check_backend(info: ModelInfo, unfit_for_megatron: str, spec: JobSpec) -> None:
    """Checks that the job's back end can train the model; `unfit_for_megatron`: of the model's facts. Raises ModelError."""
    if spec.learner.backend is BackendName.FSDP2:
        return
    if info.architecture not in ON_MEGATRON:
        known = ", ".join(ON_MEGATRON)
        raise ModelError(
            f"backend megatron does not train {info.architecture} (it does: {known}); `learner.backend: fsdp2` does",
            field=FIELD,
        )
    if unfit_for_megatron:
        raise ModelError(
            f"{unfit_for_megatron} by backend megatron; `learner.backend: fsdp2` may train it", field=FIELD
        )


def split_problems(info: ModelInfo, spec: JobSpec, whose: str = "the model's") -> Iterator[Problem]:
    """Sizes of the model that the job's ranks do not divide; `whose`: the model in the messages."""
    tp, pp = spec.learner.tensor_parallel_size, spec.learner.pipeline_parallel_size
    yield from _expert_problems(info, spec, whose)
    parts = {
        "attention heads": info.num_attention_heads,
        "key-value heads": info.num_key_value_heads,
        "feed-forward columns": info.expert_intermediate_size or info.intermediate_size,
        "vocabulary entries": info.vocab_size,
    }
    for part, size in parts.items():
        if size % tp:
            yield Problem("learner.tensor_parallel_size", f"{tp} does not divide {whose} {size} {part}")
    if info.num_layers % pp:
        yield Problem("learner.pipeline_parallel_size", f"{pp} does not divide {whose} {info.num_layers} layers")


def _expert_problems(info: ModelInfo, spec: JobSpec, whose: str) -> Iterator[Problem]:
    ep, field = spec.learner.expert_parallel_size, "learner.expert_parallel_size"
    if not info.num_experts:
        if ep > 1:
            yield Problem(field, f"{ep} ranks cannot share the experts of {whose} {info.architecture}, which has none")
        if spec.learner.router_aux_loss_coef:
            yield Problem("learner.router_aux_loss_coef", f"{whose} {info.architecture} has no experts")
        return
    if info.num_experts % ep:
        yield Problem(field, f"{ep} does not divide {whose} {info.num_experts} experts")
    if spec.learner.tensor_parallel_size > 1:
        yield Problem(
            "learner.tensor_parallel_size",
            f"it must be 1 for {whose} experts, which learner.expert_parallel_size divides over ranks",
        )


def _size_problems(info: ModelInfo, spec: JobSpec) -> Iterator[Problem]:
    yield from split_problems(info, spec)
    heads, kv_heads = info.num_attention_heads, info.num_key_value_heads
    engine, field = spec.rollout.tensor_parallel_size, "rollout.tensor_parallel_size"
    if heads % engine:
        yield Problem(field, f"{engine} does not divide the model's {heads} attention heads")
    elif kv_heads % engine and engine % kv_heads:
        # The engine replicates key-value heads when there are fewer than devices.
        yield Problem(field, f"{engine} neither divides nor is a multiple of the model's {kv_heads} key-value heads")
    positions, limit, response = info.max_position_embeddings, spec.model.max_model_len, spec.rollout.rollout_max_tokens
    if limit is not None and limit > positions:
        yield Problem("model.max_model_len", f"{limit} is more than the model's {positions} positions")
    length = min(limit or positions, positions)
    if length <= response:
        yield Problem("rollout.rollout_max_tokens", f"{response} leaves no room for a prompt within {length} tokens")


def _files(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", field=FIELD) from error


def _reject_code(path: Path) -> None:
    for file in _files(path):
        if not file.is_file() and not file.is_dir():
            raise ModelError(f"{file} is neither a file nor a directory", field=FIELD)
        suffix = file.suffix.lower()
        if suffix in PICKLES:
            reject(file, "pickled files can run code; `millrace models add` copies a directory without them")
        if suffix in _CODE:
            reject(file, "a model directory must not contain code")
        if suffix == ".json" and "config" in file.name and _has_key(read_json(file), "auto_map"):
            reject(file, "`auto_map` asks for remote code, which is never run")


def _check_weights(path: Path) -> None:
    index_path = path / INDEX
    if index_path.is_file():
        shards = read_json(index_path).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            reject(index_path, "has no weight_map")
        for shard in sorted({str(name) for name in shards.values()}):
            if Path(shard).name != shard or not (path / shard).is_file():
                reject(index_path, f"names {shard!r}, which is not a file of the directory")
    elif not (path / SINGLE).is_file():
        raise ModelError(f"{path} has no model.safetensors (nor an index of shards)", field=FIELD)


def read_shape(path: Path) -> ModelInfo:
    """The shape of a model from its config.json. Raises ModelError: not a supported architecture, or a size is wrong or missing."""
    config = read_json(path)
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if len(names) != 1 or not isinstance(names[0], str) or not _CAUSAL.fullmatch(names[0]):
        reject(
            path,
            f"architectures {repr(architectures)[:200]} is not supported: it must be one causal language model (…ForCausalLM)",
        )
    if config.get("quantization_config") is not None:
        reject(path, "quantized weights (`quantization_config`) cannot be trained")
    size = partial(read_size, path, config)
    layers, heads, hidden = size("num_hidden_layers"), size("num_attention_heads"), size("hidden_size")
    width, vocabulary, positions = size("intermediate_size"), size("vocab_size"), size("max_position_embeddings")
    kv_heads = size("num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        reject(path, f"num_key_value_heads ({kv_heads}) does not divide num_attention_heads ({heads})")
    if config.get("head_dim") is None and hidden % heads:
        reject(path, f"num_attention_heads ({heads}) does not divide hidden_size ({hidden})")
    num_experts, expert_width = expert_sizes(path, config)
    return ModelInfo(
        architecture=names[0],
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        intermediate_size=width,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=num_experts,
        expert_intermediate_size=expert_width,
    )


def expert_sizes(path: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Number and width of a layer's experts, where Megatron trains the mixture; 0 of other models. Raises ModelError as `read_size`."""
    match config.get("model_type"):
        case "qwen3_moe":
            count = "num_experts" if "num_experts" in config else "num_local_experts"  # older and newer releases
            return read_size(path, config, count), read_size(path, config, "moe_intermediate_size")
        case "mixtral":
            return read_size(path, config, "num_local_experts"), read_size(path, config, "intermediate_size")
        case _:
            return 0, 0


def read_size(path: Path, config: dict[str, Any], key: str) -> int:
    """A size in config.json, which lies at `path`. Raises ModelError unless it is an integer within 1..MAX_SIZE."""
    value = config.get(key)
    if type(value) is not int or value < 1:
        reject(path, f"{key} must be a positive integer, not {repr(value)[:80]}")
    if value > MAX_SIZE:
        reject(path, f"{key} is larger than {MAX_SIZE}")
    return value


def check_tokenizer_files(path: Path) -> None:
    """The directory has a tokenizer. Raises ModelError."""
    forms = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
    if not any(all((path / name).is_file() for name in form) for form in forms):
        forms_text = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        raise ModelError(f"{path} has no tokenizer ({forms_text})", field=FIELD)


def check_chat_template(path: Path, remedy: str = "") -> None:
    """The directory has a chat template. Raises ModelError, with the remedy, e.g. `; give one`."""
    config_path = path / "tokenizer_config.json"
    template = read_json(config_path).get("chat_template") if config_path.is_file() else None
    if not template and not (path / "chat_template.jinja").is_file():
        forms_text = "chat_template.jinja, or `chat_template` in tokenizer_config.json"
        raise ModelError(f"{path} has no chat template ({forms_text}){remedy}", field=FIELD)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory. Raises ModelError, also for a file larger than MAX_JSON_BYTES."""
    try:
        if not path.is_file():  # reading a pipe never ends
            reject(path, "is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            reject(path, f"is larger than {MAX_JSON_BYTES} bytes")
        document = json.loads(content)
    except OSError as error:
        reject(path, f"cannot be read: {error.strerror}", error)
    except (ValueError, RecursionError) as error:
        reject(path, f"is not JSON: {error}", error)
    if not isinstance(document, dict):
        reject(path, f"must be a JSON object, not {type(document).__name__}")
    return document


def _has_key(document: object, key: str) -> bool:
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if key in value:
                return True
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return False


def reject(file: Path, problem: str, cause: BaseException | None = None) -> NoReturn:
    """Raises ModelError: `model.path: <file>: <problem>`."""
    raise ModelError(f"{file}: {problem}", field=FIELD) from cause
