"""A tiny Llama with a tokenizer of its own, weights that say which version they are, and staged files of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.spec.job import JobSpec
from services.common.weight_sync.staging import Stage, StagedWeights
from services.common.weights.snapshot import Snapshot

UNKNOWN = "<unk>"
SPECIAL = ["<pad>", "<eos>", UNKNOWN, "<user>", "<assistant>"]
VOCAB = 128
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
Tensors = dict[str, torch.Tensor]
StageWeights = Callable[[int, int, Tensors], StagedWeights]


def write_model(folder: Path) -> None:
    """A tied character-level Llama with random weights: 2 layers, heads of 32 (the CPU kernels take no smaller), 256 positions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = [*SPECIAL, *(chr(code) for code in range(32, 127))]
    tokens += [f"<spare{number}>" for number in range(VOCAB - len(tokens))]
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=UNKNOWN, chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def weights(model_dir: Path) -> Tensors:
    """The model's own weights, the output head included."""
    from safetensors.torch import load_file

    tensors: Tensors = load_file(model_dir / "model.safetensors")
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def that_say(token: int, weights: Tensors) -> Tensors:
    """Weights under which every token sampled is `token`, whatever came before: the tokens tell which version made them."""
    made = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for name, tensor in made.items():
        if "norm" in name:
            tensor.fill_(1.0)
        if name in {"model.embed_tokens.weight", "lm_head.weight"}:
            tensor.fill_(1.0)
            tensor[token] = 3.0
    return made


def snapshot(lineage: int, n: int, tensors: Tensors) -> Snapshot:
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    return Snapshot.build(
        lineage, n,
        {
            name: (names[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().reshape(-1))
            for name, tensor in tensors.items()
        },
    )  # fmt: skip


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("stage") / "r0")
    yield made
    made.close()


@pytest.fixture(scope="session")
def stage_weights(stage: Stage) -> StageWeights:
    def write(lineage: int, n: int, tensors: Tensors) -> StagedWeights:
        whole = snapshot(lineage, n, tensors)
        with stage.begin(lineage, n, whole.tensors) as writer:
            for spec, data in zip(whole.tensors, whole.data, strict=True):
                writer.write(spec.name, 0, np.ascontiguousarray(data).data)
            return writer.commit(fetch_s=0.0, wire_bytes=whole.total_bytes)

    return write


@pytest.fixture(scope="session")
def spec() -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": {"path": "tiny"},
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "rollout": {"group_size": 4, "rollout_max_tokens": 32, "max_concurrent_groups": 8, "kv_cache_gib": 0.25},
        }
    )


@pytest.fixture(scope="module", autouse=True)
def environment_restored() -> Iterator[None]:
    """What an engine sets in this process's environment ends with the module: other tests must not see it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
