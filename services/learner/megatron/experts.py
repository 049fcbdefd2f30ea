"""Mixture of experts: the router of a layer, its figures and load-balancing loss, and the experts' names.

hidden states ─► router ─► the top experts of each position and their weights ─► Megatron's exchange of positions ─► experts

Of E experts with the share f_e of the choices and the mean probability P_e, the load-balancing loss is E · Σ f_e · P_e (Switch Transformer,
arXiv:2101.03961, §2.2): 1 when the load is even. Over a batch it is the mean over its micro-batches, weighted by their positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)(?=\.)")


class Router(TopKRouter):  # type: ignore[misc]  # Megatron comes without types
    """Megatron's router of the top experts, which counts what it chooses where gradients are computed."""

    tokens_per_position: float = 0.0
    """Trained tokens of the global batch ÷ its positions: Megatron divides every gradient by the trained tokens."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self._sums = torch.zeros(config.num_moe_experts + 3)

    def gating(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  Megatron's name
        """Logits [s, b, E] in float32; Megatron's own needs Transformer Engine."""
        return torch.nn.functional.linear(input.float(), self.weight.float())

    def routing(self, logits: torch.Tensor, *args: object, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, and whether an expert is chosen, [s · b, E] each, from logits [s, b, E]."""
        weights, chosen = super().routing(logits, *args, **named)
        if not torch.is_grad_enabled():  # without gradients, or the first of two passes of recomputed activations
            return weights, chosen
        probabilities = logits.flatten(0, 1).float().softmax(-1)
        choices = chosen.sum(0).float()
        loss, positions = self._load_balancing(probabilities, choices)
        with torch.no_grad():
            entropy = -probabilities.xlogy(probabilities).sum()
            figures = torch.stack([entropy, loss * positions, entropy.new_tensor(len(chosen))])
            self._sums = self._sums.to(choices.device) + torch.cat([choices, figures])
        if coefficient := self.config.moe_aux_loss_coeff:
            weights = MoEAuxLossAutoScaler.apply(weights, loss * (coefficient * self.tokens_per_position) * positions)
        return weights, chosen

    def take_figures(self) -> torch.Tensor:
        """Since the last call, of this rank: choices of each expert; sums over positions of entropy, nats, and loss; positions: [E + 3]."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken

    def _load_balancing(self, probabilities: torch.Tensor, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's term of the loss of a micro-batch, whose positions TP and CP ranks share; and the number of all its positions."""
        totals = torch.cat([choices, choices.new_tensor([float(len(probabilities))])])
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(totals, group=self.tp_cp_group)
        positions = totals[-1]
        shares = totals[:-1] / (self.topk * positions)
        return len(shares) * (shares * probabilities.sum(0)).sum() / positions, positions


def routers_of(chunk: torch.nn.Module) -> list[Router]:
    """The routers of this pipeline stage; none of a dense model."""
    return [module for module in chunk.modules() if isinstance(module, Router)]


def router_figures(routers: Iterable[Router], layers: int, experts: int, device: torch.device) -> dict[str, float]:
    """Figures of all layers since the last call, the same on every rank; every rank calls it at the same time."""
    table = torch.zeros(layers, experts + 3, device=device)
    for router in routers:
        table[router.layer_number - 1] = router.take_figures()
    if dist.get_world_size() > 1:
        dist.all_reduce(table)
    choices, (entropy, loss, positions) = table[:, :experts], table[:, experts:].T
    return {
        "router_load_max": float((choices.max(1).values / choices.mean(1)).mean()),
        "router_load_min": float((choices.min(1).values / choices.mean(1)).mean()),
        "router_entropy": float((entropy / positions).mean()),
        "router_balance_loss": float((loss / positions).mean()),
    }


def is_expert(name: str) -> bool:
    """Whether this parameter, local or global, is one of an expert's."""
    return _EXPERT.search(name) is not None


def shift_experts(name: str, experts: int) -> str:
    """The name with this many experts before those of its rank."""
    return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + experts}", name)


def expert_count(names: Iterable[str]) -> int:
    """The experts of a layer that have parameters among these."""
    return len({match[2] for name in names if (match := _EXPERT.search(name))})
