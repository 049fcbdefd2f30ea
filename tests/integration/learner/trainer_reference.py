"""A clean process: makes tiny models, and what plain transformers and torch say of them in float32 and float64. No Megatron here."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.integration.learner.trainer_cases import (
    ADAM,
    CLIP_HIGH,
    CLIP_LOW,
    STEPS,
    TEMPERATURE,
    VOCABULARY,
    WARMUP_STEPS,
    arrays,
)

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16_384,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def build(name: str, layers: int = SIZES["num_hidden_layers"], vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A random model; every tensor is random, the norms and biases too."""
    sizes = SIZES | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    rope = {"rope_type": "default", "rope_theta": 30_000.0}
    model: PreTrainedModel = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=False, rope_parameters=rope)),
        "qwen3": lambda: Qwen3ForCausalLM(
            Qwen3Config(**sizes, head_dim=24, tie_word_embeddings=True, rope_parameters=rope)
        ),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def token_losses(model: PreTrainedModel, item: dict[str, Any]) -> torch.Tensor:
    """The clipped token losses of one sequence, alone in a batch of one."""
    tokens = torch.from_numpy(np.asarray(item["tokens"])).long()
    prompt = int(item["prompt_len"])
    logits = model(input_ids=tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
    logprobs = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - prompt), tokens[prompt:]]
    ratio = torch.exp(logprobs - torch.from_numpy(np.asarray(item["inference_logprobs"])))
    advantage = torch.from_numpy(np.asarray(item["advantage"]))
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantage, clipped * advantage)[torch.from_numpy(np.asarray(item["loss_mask"]))]


def train(model: PreTrainedModel) -> dict[str, list[float]]:
    """Trains in float64, one sequence after the other, with torch's AdamW; gives losses and gradient norms."""
    optimizer = adamw(model.parameters(), ADAM)
    batch = arrays()
    tokens = sum(int(np.sum(item["loss_mask"])) for item in batch)
    said: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = sum(float(_backward(token_losses(model, item).sum() / tokens)) for item in batch)
        said["loss"].append(loss)
        said["grad_norm"].append(take_step(optimizer, model, step))
    return said


def adamw(parameters: Iterable[torch.nn.Parameter], settings: Mapping[str, Any]) -> torch.optim.AdamW:
    """torch's AdamW, which lets biases and norms not decay."""
    trained = list(parameters)
    decayed, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        betas=(settings["adam_beta1"], settings["adam_beta2"]),
        eps=settings["adam_eps"],
    )


def take_step(optimizer: torch.optim.AdamW, model: PreTrainedModel, step: int) -> float:
    """Takes a step of the warm-up with clipped gradients; gives their norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["clip_grad"])
    for group in optimizer.param_groups:
        group["lr"] = ADAM["lr"] * min(1.0, step / WARMUP_STEPS)
    optimizer.step()
    return float(norm)


def write_model(model: PreTrainedModel, root: Path, name: str) -> None:
    """Writes its Hugging Face directory, and its logits at every token of the batch."""
    model.save_pretrained(root / name)
    (root / name / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        logits = {
            str(i): model(input_ids=torch.from_numpy(np.asarray(item["tokens"])).long()[None, :-1])
            .logits[0]
            .contiguous()
            for i, item in enumerate(arrays())
        }
    save_file(logits, root / f"{name}.logits.safetensors")


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def main(root: Path) -> None:
    """Writes, per model: the Hugging Face directory, float32 logits, and float64 losses, gradient norms and trained weights."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    said = {}
    for name in ("llama", "qwen2", "qwen3"):
        model = build(name)
        write_model(model, root, name)
        exact = copy.deepcopy(model).double()
        said[name] = train(exact)
        save_file({k: v.contiguous() for k, v in exact.state_dict().items() if k != "lm_head.weight" or name == "qwen2"},
                  root / f"{name}.trained.safetensors")  # fmt: skip
    (root / "reference.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
