"""A model directory is tried before a job is taken in: whatever is wrong with it is one line that names the file."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.demo.charlm_tokenizer import VOCAB_SIZE, make_tokenizer, save_tokenizer
from services.common.errors import ModelError
from services.common.models.directory import ModelInfo, check_backend
from services.common.models.trial import check_model
from services.common.models.weight_files import check_tensors, check_values, needed_tensors, read_headers
from services.common.spec.job import JobSpec
from tests.unit.small_models import LLAMA

CONFIG = LLAMA | {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": 1}
INFO = ModelInfo("LlamaForCausalLM", 2, 4, 2, 32, 48, VOCAB_SIZE, 256, tie_word_embeddings=True)
UP = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[Path], object]


def tensors_of(config: dict[str, Any] = CONFIG, info: ModelInfo = INFO) -> dict[str, Any]:
    return {name: np.full(shape, 0.5, np.float32) for name, shape in needed_tensors(info, config)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(make_tokenizer(256), folder)
    save_file(tensors_of(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_model(str(folder), time.monotonic() + 20)
    message = str(caught.value)
    assert message.startswith("model.path: ")
    assert "\n" not in message
    assert len(message) < 1000
    return message.removeprefix("model.path: ")


def config(**values: object) -> Change:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | values))


def text(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def template(source: str) -> Change:
    return text("chat_template.jinja", source)


def tokenizer(**values: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def weights(**values: Any) -> Change:
    """Tensors changed, added, or (None) left out."""
    names = {name.replace("__", "."): value for name, value in values.items()}

    def change(folder: Path) -> None:
        changed = {name: value for name, value in (tensors_of() | names).items() if value is not None}
        save_file(changed, folder / "model.safetensors")

    return change


def value(number: float, dtype: Any = np.float32) -> Change:
    tensor = np.full((48, 32), 0.5, dtype)
    tensor[3, 5] = number
    return weights(**{UP.replace(".", "__"): tensor})


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """The header's entries changed, the values left as they are."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        made = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + length :])

    return apply


def cut(size: int) -> Change:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def bloated(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, 200 << 20)  # a hole: no room on the disk


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def split(entries: dict[str, str] | None = None, **moved: str) -> Change:
    """Two shards with an index that places tensors as told."""

    def change(folder: Path) -> None:
        whole = tensors_of()
        (folder / "model.safetensors").unlink()
        first = {name: tensor for name, tensor in whole.items() if "layers.1" not in name}
        save_file(first, folder / "a.safetensors")
        save_file({name: tensor for name, tensor in whole.items() if name not in first}, folder / "b.safetensors")
        placed = {name: "a.safetensors" if name in first else "b.safetensors" for name in whole}
        index = {"weight_map": {name: place for name, place in (placed | moved | (entries or {})).items() if place}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def test_a_sound_model_passes_and_is_described(model: Path) -> None:
    facts = check_model(str(model), time.monotonic() + 20)
    assert ModelInfo(**facts["shape"]) == INFO
    assert facts["takes_system"]
    assert facts["vocabulary"] == VOCAB_SIZE
    assert facts["tensors"] == len(tensors_of())
    assert facts["parameters"] == sum(tensor.size for tensor in tensors_of().values())
    assert facts["weight_bytes"] == facts["checked_bytes"] == sum(tensor.nbytes for tensor in tensors_of().values())
    assert facts["all_checked"]


def test_a_vocabulary_that_is_padded_and_a_model_in_shards_are_fine(model: Path) -> None:
    split()(model)
    assert check_model(str(model), time.monotonic() + 20)["all_checked"]
    text("generation_config.json", json.dumps({"eos_token_id": [0, 1]}))(model)
    assert check_model(str(model), time.monotonic() + 20)["all_checked"]


def test_a_base_model_is_taken_with_the_jobs_own_template_and_only_then(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in refusal(model)
    until = time.monotonic() + 20
    own = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}hi"
    assert check_model(str(model), until, own)["takes_system"] is False
    with pytest.raises(ModelError, match=r"model\.chat_template: the chat template fails"):
        check_model(str(model), until, "{% for %}{{ messages }}")


def test_a_template_that_wants_a_system_message_or_none_is_fine(model: Path) -> None:
    wants = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[1]['content'] }}"
    template(wants)(model)
    assert check_model(str(model), time.monotonic() + 20)["takes_system"]
    template("{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}hi")(model)
    assert not check_model(str(model), time.monotonic() + 20)["takes_system"]


def test_an_output_head_of_a_tied_model_and_old_buffers_are_no_strangers(model: Path) -> None:
    head = np.zeros((VOCAB_SIZE, 32), np.float32)
    weights(lm_head__weight=head, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))(model)
    assert check_model(str(model), time.monotonic() + 20)["tensors"] == len(tensors_of()) + 1


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        (text("tokenizer.json", "{"), "tokenizer.json", "EOF"),
        (text("tokenizer.json", "[]"), "tokenizer.json", "Exception"),
        (text("tokenizer.json", b"\xff\xfe"), "tokenizer.json", ""),
        (tokenizer(model={"type": "Nope"}), "tokenizer.json", ""),
        (tokenizer(model={"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}), "tokenizer.json", ""),
        (tokenizer(version="99.0"), "tokenizer.json", ""),
        (tokenizer(pre_tokenizer={"type": "Newer"}), "tokenizer.json", ""),
        (tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}), "tokenizer.json", ""),
        (text("tokenizer_config.json", '{"chat_template": 3, "tokenizer_class": 7}'), "", ""),
        (text("tokenizer_config.json", '{"chat_template": "x", "eos_token": {"a": [1]}}'), "", ""),
        (bloated("tokenizer.json"), "tokenizer.json", "larger than"),
        (bloated("chat_template.jinja"), "chat_template.jinja", "larger than"),
        (pipe("special_tokens_map.json"), "special_tokens_map.json", "neither a file"),
        (pipe("generation_config.json"), "generation_config.json", "neither a file"),
        (config(vocab_size=200), "", "the model has 200 tokens"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_loaded_names_the_file(model: Path, change: Change, file: str, words: str) -> None:
    change(model)
    said = refusal(model)
    assert file in said
    assert words in said


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 300000 }}", "300000 characters"),
        ("{% for i in range(9999) %}{% for j in range(99) %}x{% endfor %}{% endfor %}", "989901 characters"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% include 'a' %}", "chat template fails"),
        ("{% if false %}x{% endif %}", "without tokens"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_or_makes_too_much_names_the_file(model: Path, source: str, words: str) -> None:
    template(source)(model)
    said = refusal(model)
    assert "chat_template.jinja: the chat template" in said
    assert words in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config(model_type="qwen2"), "model_type is 'qwen2', and LlamaForCausalLM is 'llama'"),
        (config(model_type="nope"), "config.json: ValueError"),
        (config(model_type=None), "config.json: "),
        (config(rms_norm_eps="x"), "rms_norm_eps must be a positive number"),
        (config(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (config(rope_theta=-1), "rope_theta must be a positive number"),
        (config(rope_parameters={"rope_type": []}), "rope_type = [] is not supported"),
        (config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}), "factor"),
        (config(rope_theta=float("inf")), "rope_theta is inf"),
        (config(rope_parameters=[3]), "config.json: "),
        (config(head_dim=True), "head_dim must be a positive integer"),
        (config(head_dim=10**12), "head_dim must be a positive integer"),
        (config(eos_token_id=10**9), "eos_token_id 1000000000 is not one of the model's"),
        (config(eos_token_id=[2, "x"]), "eos_token_id 'x' is not one"),
        (config(num_hidden_layers=2**30), "model.layers.2.input_layernorm.weight is missing"),
        (config(num_hidden_layers=10**30), "larger than"),
        (config(hidden_size=64), "model.embed_tokens.weight is [272, 32], and config.json makes it [272, 64]"),
        (config(tie_word_embeddings=False), "lm_head.weight is missing"),
        (config(num_hidden_layers=1), "model.layers.1.input_layernorm.weight is none of LlamaForCausalLM's"),
        (text("generation_config.json", '{"eos_token_id": -3}'), "generation_config.json: eos_token_id -3"),
        (text("generation_config.json", "["), "generation_config.json: is not JSON"),
        (text("config.json", "[" * 100_000), "config.json: is not JSON"),
    ],
)
def test_a_config_that_does_not_fit_says_how(model: Path, change: Change, words: str) -> None:
    change(model)
    assert words in refusal(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type = 'yarn' is not supported",
        ),
        (config(hidden_act="gelu"), "config.json: hidden_act = 'gelu' is not supported"),
    ],
)
def test_what_megatron_alone_would_train_wrongly_is_told_and_fits_the_other_back_end(
    model: Path, change: Change, words: str
) -> None:
    change(model)
    facts = check_model(str(model), time.monotonic() + 20)
    assert words in facts["unfit_for_megatron"]
    info = ModelInfo(**facts["shape"])
    with pytest.raises(ModelError, match=r"by backend megatron; `learner.backend: fsdp2` may train it"):
        check_backend(info, facts["unfit_for_megatron"], spec_of("megatron"))
    check_backend(info, facts["unfit_for_megatron"], spec_of("fsdp2"))


def test_an_architecture_without_a_bridge_is_one_for_the_other_back_end(model: Path) -> None:
    config(architectures=["PhiForCausalLM"], model_type="phi")(model)
    facts = check_model(str(model), time.monotonic() + 20)
    info = ModelInfo(**facts["shape"])
    with pytest.raises(
        ModelError, match=r"backend megatron does not train PhiForCausalLM .*`learner.backend: fsdp2` does"
    ):
        check_backend(info, facts["unfit_for_megatron"], spec_of("megatron"))
    check_backend(info, facts["unfit_for_megatron"], spec_of("fsdp2"))


def spec_of(backend: str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"path": "tiny"},
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "learner": {"backend": backend},
        }
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (text("model.safetensors", b""), "is no safetensors file"),
        (text("model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "says that its header has"),
        (text("model.safetensors", struct.pack("<Q", 31 << 20) + b"{}"), "is no safetensors file"),
        (text("model.safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000), "is no safetensors file"),
        (cut(1000), "is no safetensors file"),
        (bloated("model.safetensors"), "is no safetensors file"),
        (header(lambda all_of: all_of[UP]["data_offsets"].__setitem__(0, 0)), "is no safetensors file"),
        (header(lambda all_of: all_of[UP].update(shape=[2**40, 2**40])), "is no safetensors file"),
        (header(lambda all_of: all_of[UP].update(shape=[-48, -32])), "is no safetensors file"),
        (header(lambda all_of: all_of[UP].pop("dtype")), "is no safetensors file"),
        (
            header(lambda all_of: all_of[UP].update(shape=[32, 48])),
            f"{UP} is [32, 48], and config.json makes it [48, 32]",
        ),
        (header(lambda all_of: all_of[UP].update(dtype="I32")), f"{UP} is of type I32"),
        (header(lambda all_of: all_of[UP].update(dtype="F8_E4M3", shape=[192, 32])), f"{UP} is of type F8_E4M3"),
        (weights(model__norm__weight=None), "model.norm.weight is missing"),
        (weights(model__extra=np.ones(3, np.float32)), "model.extra is none of LlamaForCausalLM's"),
        (weights(model__norm__weight=np.ones((0,), np.float32)), "model.norm.weight has no values"),
        (weights(lm_head__weight=np.ones((3, 32), np.float32)), "lm_head.weight is [3, 32]"),
        (value(np.nan), f"{UP} has a value that is not finite, at [3, 5]"),
        (value(-np.inf), f"{UP} has a value that is not finite, at [3, 5]"),
        (value(np.inf, np.float16), f"{UP} has a value that is not finite, at [3, 5]"),
        (split(model__norm__weight="c.safetensors"), "c.safetensors"),
        (split({"model.norm.weight": "b.safetensors"}), "does not place model.norm.weight in a.safetensors"),
        (split({"model.more": "b.safetensors"}), "places model.more in b.safetensors, which does not have it"),
        (split({"model.norm.weight": ""}), "does not place model.norm.weight in a.safetensors"),
        (text("other.safetensors", b""), "other.safetensors: lies beside model.safetensors without an index"),
    ],
)
def test_weights_that_cannot_be_loaded_or_trained_name_file_and_tensor(model: Path, change: Change, words: str) -> None:
    change(model)
    said = refusal(model)
    assert words in said
    assert "safetensors" in said


def test_a_tensor_in_two_shards_is_refused(model: Path) -> None:
    split({"model.norm.weight": "a.safetensors"})(model)
    save_file({"model.norm.weight": np.ones(32, np.float32)}, model / "c.safetensors")
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["another"] = "c.safetensors"
    path.write_text(json.dumps(index))
    assert "model.norm.weight is in a.safetensors too" in refusal(model)


@pytest.mark.parametrize(
    ("bits", "bad"), [(0x7F80, True), (0xFFC1, True), (0x7F7F, False), (0xFF7F, False), (0x0001, False)]
)
def test_bfloat16_is_judged_by_its_bits(tmp_path: Path, bits: int, bad: bool) -> None:
    values = np.zeros(1000, np.uint16)
    values[777] = bits
    entry = {"t": {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}}
    made = json.dumps(entry).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(made)) + made + values.tobytes())
    tensors = read_headers(tmp_path).values()
    if bad:
        with pytest.raises(ModelError, match=r"t has a value that is not finite, at \[7, 77\]"):
            check_values(tensors, time.monotonic() + 20)
    else:
        assert check_values(tensors, time.monotonic() + 20).all


def test_every_value_of_a_long_tensor_is_looked_at(tmp_path: Path) -> None:
    values = np.zeros(5_000_000, np.float32)
    values[-1] = np.nan
    save_file({"t": values}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"not finite, at \[4999999\]"):
        check_values(read_headers(tmp_path).values(), time.monotonic() + 20)


def test_no_time_left_is_said_and_is_no_refusal(tmp_path: Path) -> None:
    save_file({"t": np.zeros(1000, np.float32)}, tmp_path / "model.safetensors")
    looked = check_values(read_headers(tmp_path).values(), time.monotonic() - 1)
    assert (looked.bytes, looked.of_bytes, looked.all) == (0, 4000, False)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 24}),
        ("Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 8}),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_that_are_needed_are_those_that_transformers_makes(
    tmp_path: Path, architecture: str, settings: dict[str, Any], tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    document = (
        {name: value for name, value in CONFIG.items() if name != "model_type"}
        | settings
        | {"tie_word_embeddings": tied}
    )
    family = architecture.removesuffix("ForCausalLM")
    made = getattr(transformers, architecture)(getattr(transformers, f"{family}Config")(**document))
    made.save_pretrained(tmp_path)
    info = ModelInfo(architecture, 2, 4, 2, 32, 48, VOCAB_SIZE, 256, tie_word_embeddings=tied)
    check_tensors(tmp_path, read_headers(tmp_path), info, document)
    saved = {name: tensor.shape for name, tensor in read_headers(tmp_path).items()}
    assert saved == dict(needed_tensors(info, document))
