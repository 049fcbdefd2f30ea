"""What a model directory must have, must not have, and how it may be split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.errors import ModelError
from services.common.models.directory import (
    ModelInfo,
    check_chat_template,
    check_parallel_sizes,
    inspect_model,
    resolve_model,
)
from services.common.spec.job import JobSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
INFO = ModelInfo(
    "LlamaForCausalLM",
    num_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    hidden_size=64,
    intermediate_size=192,
    vocab_size=128,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def make_model(path: Path, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", model_roots=[tmp_path / "root"])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def spec(**sections: dict[str, Any]) -> JobSpec:
    source = {"source": "reasoning_gym:chain_sum"}
    rollout = {"rollout_max_tokens": 32} | sections.pop("rollout", {})
    model = {"path": "tiny"} | sections.pop("model", {})
    return JobSpec.model_validate({"model": model, "data": {"train": source}, "rollout": rollout, **sections})


def test_a_registered_name_is_a_directory_below_the_models_directory(settings: Settings) -> None:
    made = make_model(settings.models_dir / "tiny")
    assert resolve_model("tiny", settings) == made


def test_a_path_under_a_model_root_resolves_absolute_or_relative(settings: Settings, tmp_path: Path) -> None:
    made = make_model(tmp_path / "root" / "org" / "m")
    assert resolve_model(str(made), settings) == made
    assert resolve_model("org/m", settings) == made


def test_an_unknown_name_is_refused_with_the_names_that_are_near(settings: Settings) -> None:
    make_model(settings.models_dir / "smollm2")
    with pytest.raises(ModelError, match=r"^model\.path: there is no model 'smollm'.*did you mean smollm2\?"):
        resolve_model("smollm", settings)


def test_a_missing_directory_is_named(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .*root/gone is not a directory"):
        resolve_model(str(tmp_path / "root" / "gone"), settings)


@pytest.mark.parametrize("name", ["/etc", "../model", "a/../../b", "tiny\0", ".", "", "/"])
def test_what_leads_outside_the_roots_is_refused(name: str, settings: Settings) -> None:
    with pytest.raises(ModelError, match=r"^model\.path: "):
        resolve_model(name, settings)


def test_a_name_too_long_for_the_file_system_is_refused(settings: Settings) -> None:
    with pytest.raises(ModelError, match=r"^model\.path: "):
        resolve_model("x" * 1000, settings)


def test_a_link_that_leaves_the_roots_is_refused(settings: Settings, model: Path) -> None:
    settings.models_dir.mkdir(parents=True)
    (settings.models_dir / "escape").symlink_to(model)
    with pytest.raises(ModelError, match="outside the allowed directories"):
        resolve_model("escape", settings)


def test_a_loop_of_links_is_refused(settings: Settings) -> None:
    settings.models_dir.mkdir(parents=True)
    (settings.models_dir / "loop").symlink_to(settings.models_dir / "loop")
    with pytest.raises(ModelError, match=r"^model\.path: "):
        resolve_model("loop", settings)


def test_a_file_linked_from_outside_the_roots_is_refused(settings: Settings, tmp_path: Path) -> None:
    made = make_model(settings.models_dir / "tiny")
    secret = tmp_path / "secret"
    secret.write_text("x")
    (made / "extra.txt").symlink_to(secret)
    with pytest.raises(ModelError, match=r"tiny/extra\.txt is a link that leads outside"):
        resolve_model("tiny", settings)


def test_a_file_linked_within_the_roots_is_fine(settings: Settings, tmp_path: Path) -> None:
    """The hub's cache keeps its files as links to blobs."""
    made = make_model(tmp_path / "root" / "snapshots" / "m")
    blob = tmp_path / "root" / "blob"
    (made / "model.safetensors").rename(blob)
    (made / "model.safetensors").symlink_to(blob)
    assert resolve_model("snapshots/m", settings) == made


def test_the_shape_is_read(model: Path) -> None:
    assert inspect_model(model) == INFO


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_supported_architectures_are_accepted(tmp_path: Path, architecture: str) -> None:
    assert inspect_model(make_model(tmp_path / "m", architectures=[architecture])).architecture == architecture


def test_without_key_value_heads_there_are_as_many_as_heads(tmp_path: Path) -> None:
    assert inspect_model(make_model(tmp_path / "m", num_key_value_heads=None)).num_key_value_heads == 8


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "w.pt",
        "w.PTH",
        "w.ckpt",
        "w.pkl",
        "w.pickle",
        "modeling_x.py",
        "x.pyc",
        "training_args.bin",
    ],
)
def test_pickles_and_code_are_refused_by_name(model: Path, name: str) -> None:
    (model / name).write_bytes(b"")
    with pytest.raises(ModelError, match=rf"^model\.path: .*{name}: "):
        inspect_model(model)


def edit(name: str, value: dict[str, Any]) -> Callable[[Path], None]:
    return write(name, json.dumps(value))


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / name).write_text(text)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


AUTO_MAP = {"auto_map": {"AutoModelForCausalLM": "modeling.X"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("config.json"), r"config\.json is missing"),
        (edit("config.json", CONFIG | AUTO_MAP), r"config\.json: `auto_map`"),
        (edit("config.json", CONFIG | {"text_config": {"deep": [AUTO_MAP]}}), r"config\.json: `auto_map`"),
        (edit("tokenizer_config.json", {"chat_template": "x"} | AUTO_MAP), r"tokenizer_config\.json: `auto_map`"),
        (edit("generation_config.json", AUTO_MAP), r"generation_config\.json: `auto_map`"),
        (remove("model.safetensors"), r"has no model\.safetensors"),
        (edit("model.safetensors.index.json", {"weight_map": {"a": "s-1.safetensors"}}), r"names 's-1\.safetensors'"),
        (edit("model.safetensors.index.json", {"weight_map": {"a": "../x"}}), r"names '\.\./x'"),
        (edit("config.json", CONFIG | {"architectures": ["GPT2LMHeadModel"]}), "GPT2LMHeadModel.*not supported"),
        (edit("config.json", CONFIG | {"architectures": None}), "architectures None is not supported"),
        (edit("config.json", CONFIG | {"quantization_config": {}}), "quantized"),
        (edit("config.json", CONFIG | {"vocab_size": "many"}), "vocab_size must be a positive integer, not 'many'"),
        (edit("config.json", CONFIG | {"hidden_size": 0}), "hidden_size must be a positive integer, not 0"),
        (edit("config.json", CONFIG | {"num_key_value_heads": 3}), r"num_key_value_heads \(3\) does not divide"),
        (write("config.json", "{"), r"config\.json: is not JSON"),
        (write("config.json", "[]"), r"config\.json: must be a JSON object"),
        (remove("tokenizer.json"), "has no tokenizer"),
    ],
)
def test_an_unfit_directory_is_refused_by_file(model: Path, change: Callable[[Path], None], message: str) -> None:
    change(model)
    with pytest.raises(ModelError, match=r"^model\.path: .*" + message):
        inspect_model(model)


@pytest.mark.parametrize("change", [edit("tokenizer_config.json", {}), remove("tokenizer_config.json")])
def test_a_model_without_a_chat_template_is_refused_where_the_job_gives_none(
    model: Path, change: Callable[[Path], None]
) -> None:
    change(model)
    inspect_model(model)
    with pytest.raises(ModelError, match="has no chat template"):
        check_chat_template(model)


def test_a_template_file_and_shards_serve_as_well(model: Path) -> None:
    (model / "model.safetensors").rename(model / "s-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "s-1.safetensors"}}))
    (model / "tokenizer_config.json").unlink()
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect_model(model) == INFO


def test_sizes_that_divide_are_accepted() -> None:
    learner = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    check_parallel_sizes(INFO, spec(learner=learner, rollout={"tensor_parallel_size": 4}, model={"max_model_len": 256}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"learner": {"tensor_parallel_size": 3}},
            r"^learner\.tensor_parallel_size: 3 does not divide .* 8 attention heads",
        ),
        (
            {"learner": {"tensor_parallel_size": 4}},
            r"^learner\.tensor_parallel_size: 4 does not divide .* 2 key-value heads",
        ),
        (
            {"learner": {"pipeline_parallel_size": 4}},
            r"^learner\.pipeline_parallel_size: 4 does not divide .* 6 layers",
        ),
        (
            {"rollout": {"tensor_parallel_size": 3}},
            r"^rollout\.tensor_parallel_size: 3 does not divide .* 8 attention heads",
        ),
        ({"model": {"max_model_len": 512}}, r"^model\.max_model_len: 512 is more than the model's 256 positions"),
        ({"rollout": {"rollout_max_tokens": 256}}, r"^rollout\.rollout_max_tokens: 256 leaves no room"),
    ],
)
def test_a_size_that_does_not_fit_is_named_with_both_numbers(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_parallel_sizes(INFO, spec(**sections))


def test_all_sizes_that_do_not_fit_are_named_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        check_parallel_sizes(INFO, spec(learner={"tensor_parallel_size": 5, "pipeline_parallel_size": 5}))
    fields = {line.partition(":")[0] for line in str(caught.value).splitlines()}
    assert fields == {"learner.tensor_parallel_size", "learner.pipeline_parallel_size"}
