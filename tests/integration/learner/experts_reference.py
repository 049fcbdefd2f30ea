"""A clean process: makes tiny mixtures of experts, and what plain transformers and torch say of them in float64. No Megatron here."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.integration.learner.experts_cases import COEFFICIENT, EXPERTS, MODELS, TOP
from tests.integration.learner.trainer_cases import ADAM, STEPS, VOCABULARY, arrays
from tests.integration.learner.trainer_reference import adamw, take_step, token_losses, write_model

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": TOP,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 30_000.0},
    "experts_implementation": "eager",
}


def build(name: str) -> PreTrainedModel:
    """A random model; every tensor is random."""
    qwen = {"num_experts": EXPERTS, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 24}
    model: PreTrainedModel = {
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **qwen, norm_topk_prob=True)),
        "plain_weights": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **qwen, norm_topk_prob=False)),
        "mixtral": lambda: MixtralForCausalLM(
            MixtralConfig(**SIZES, num_local_experts=EXPERTS, intermediate_size=32, sliding_window=None)
        ),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def train(model: PreTrainedModel, coefficient: float) -> dict[str, Any]:
    """Trains one sequence after the other, with torch's AdamW; gives losses, gradient norms and what the routers did in each step."""
    optimizer = adamw(model.parameters(), ADAM)
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for layer, kept in zip(model.model.layers, seen, strict=True):
        gate = layer.mlp.gate
        gate.register_forward_pre_hook(
            lambda gate, args, kept=kept: kept.append(args[0].flatten(0, -2) @ gate.weight.T)
        )
    batch = arrays()
    tokens = sum(int(np.sum(item["loss_mask"])) for item in batch)
    said: dict[str, Any] = {"loss": [], "grad_norm": [], "routers": []}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for kept in seen:
            kept.clear()
        loss = sum(token_losses(model, item).sum() / tokens for item in batch)
        figures, balance = _routers(seen, batch)
        (loss + coefficient * balance).backward()  # type: ignore[no-untyped-call]
        said["loss"].append(float(loss))
        said["grad_norm"].append(take_step(optimizer, model, step))
        said["routers"].append(figures)
    return said


def _routers(seen: list[list[torch.Tensor]], batch: list[dict[str, Any]]) -> tuple[dict[str, float], torch.Tensor]:
    """Figures of the routers, and the sum of the layers' load-balancing losses; a group's prompt counts once, the last tokens never."""
    loads, entropies, losses, groups = [], [], [], [int(item["group_id"]) for item in batch]
    for kept in seen:
        parts = [
            logits[(0 if groups.index(group) == i else int(item["prompt_len"])) : -1]
            for i, (logits, item, group) in enumerate(zip(kept, batch, groups, strict=True))
        ]
        probabilities = torch.cat(parts).softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(TOP).indices, 1.0)
        losses.append(EXPERTS * (chosen.mean(0) / TOP * probabilities.mean(0)).sum())
        loads.append(chosen.mean(0) / TOP * EXPERTS)
        entropies.append(float(-(probabilities * probabilities.log()).sum(-1).mean()))
    figures = {
        "router_load_max": float(np.mean([float(load.max()) for load in loads])),
        "router_load_min": float(np.mean([float(load.min()) for load in loads])),
        "router_entropy": float(np.mean(entropies)),
        "router_balance_loss": float(np.mean([float(loss) for loss in losses])),
    }
    return figures, torch.stack(losses).sum()


def main(root: Path) -> None:
    """Writes, per model: the Hugging Face directory, float32 logits, and float64 figures, with and without the load-balancing loss."""
    torch.manual_seed(4)
    torch.set_num_threads(1)
    said: dict[str, Any] = {}
    for name in MODELS:
        model = build(name)
        write_model(model, root, name)
        said[name] = {}
        for way, coefficient in (("plain", 0.0), ("balanced", COEFFICIENT)):
            exact = copy.deepcopy(model).double()
            said[name][way] = train(exact, coefficient)
            exact.save_pretrained(root / f"{name}.{way}")
    (root / "reference.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
