"""Choice of a repository's files: what a model needs, and nothing that can run."""

from __future__ import annotations

import re

import pytest

from services.common.errors import HubRefused
from services.common.hubs.choice import choose, show_bytes, surveyed
from services.common.hubs.repository import HubFile, Repository, brief
from services.common.spec.reference import Reference

INDEX = "model.safetensors.index.json"
MODEL = Reference("hf", "org/name", "0" * 40)


def chosen(*names: str, size: int = 1, most: int = 100) -> list[str]:
    files = choose(Repository(MODEL, tuple(HubFile(name, size) for name in names)), most)
    return sorted(file.path for file in files)


def test_of_a_mixed_repository_only_what_is_needed_is_fetched() -> None:
    needed = ["LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
              "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"]  # fmt: skip
    beside = [
        "pytorch_model.bin", "training_args.bin", "modeling_x.py", "consolidated.safetensors", "model.fp16.safetensors", "onnx/config.json",
        "original/model.safetensors", ".gitattributes", "README.md", "optimizer.pt", "trainer_state.json", "x/LICENSE",
    ]  # fmt: skip
    assert chosen(*needed, *beside) == needed


def test_of_a_model_in_shards_the_index_and_its_shards_are_fetched() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert chosen("config.json", INDEX, *shards, "model.safetensors", "pytorch_model-00001-of-00002.bin") == [
        "config.json", *shards, INDEX
    ]  # fmt: skip


@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model", "weights"])
def test_shards_of_another_name_are_fetched_and_a_second_set_beside_model_is_not(stem: str) -> None:
    shards = [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert chosen("config.json", INDEX, *shards, f"x/{shards[0]}") == sorted(["config.json", INDEX, *shards])
    ours = ["model-00001-of-00001.safetensors"]
    assert chosen("config.json", INDEX, *shards, *ours) == sorted(["config.json", INDEX, *ours])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", INDEX, "a-1-of-1.safetensors", "b-1-of-1.safetensors"], "several sets of weights (a, b)"),
        (["config.json", "pytorch_model.bin", "a.pt", "b.pth", "c.ckpt"], "pickles only (a.pt, b.pth, c.ckpt, …)"),
        (["config.json", "model.gguf"], "has no model.safetensors"),
        (["config.json", INDEX], "has no model.safetensors"),
        (["model.safetensors"], "has no config.json"),
        ([], "has no config.json"),
    ],
)
def test_a_repository_without_usable_weights_is_refused_by_name(names: list[str], message: str) -> None:
    with pytest.raises(HubRefused, match=re.escape(message)):
        chosen(*names)


def test_the_size_counts_what_is_fetched() -> None:
    assert chosen("config.json", "model.safetensors", "a.bin", "b.bin", size=50) == ["config.json", "model.safetensors"]
    with pytest.raises(HubRefused, match="takes 102 bytes, and MILLRACE_MAX_HUB_BYTES allows 100 bytes"):
        chosen("config.json", "model.safetensors", size=51)


def test_the_survey_takes_configs_and_the_index_before_any_weight() -> None:
    names = ("model.safetensors", "config.json", "tokenizer_config.json", INDEX, "tokenizer.json")
    found = surveyed([HubFile(name, 1) for name in names])
    assert [file.path for file in found] == ["config.json", "tokenizer_config.json", INDEX]


def test_a_missing_data_file_is_named_with_the_nearest() -> None:
    repository = Repository(Reference("hf", "o/n", "0" * 40, "main/tran.parquet"), (HubFile("main/train.parquet", 1),))
    with pytest.raises(HubRefused, match=r"has no file main/tran\.parquet; did you mean main/train\.parquet"):
        choose(repository, 100)


def test_a_librarys_error_is_repeated_without_signatures() -> None:
    error = ValueError("\n  403 for url 'https://store/file?X-Signature=secret&n=1'\nmore")
    assert brief(error) == "403 for url 'https://store/file?…'"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "2 kB"), (2_500_000, "2.5 MB"), (98 * 10**9, "98.0 GB")],
)
def test_sizes_are_shown_in_units(count: int, text: str) -> None:
    assert show_bytes(count) == text
