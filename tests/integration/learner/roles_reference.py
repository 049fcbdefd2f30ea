"""A clean process: the jobs of roles_cases in float64 with plain transformers and torch, one sequence and one token after another.

No Megatron here, and no formula of the services.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.integration.learner.roles_cases import ACTOR, CASES, MODELS, STEPS, TEMPERATURE, tokens_of
from tests.integration.learner.trainer_reference import adamw, build

LARGEST = "max_abs_logprob_difference"
Column = list[torch.Tensor]
"""A value of each token, one [R] per sequence."""


@dataclass
class Role:
    """A model in training."""

    modules: list[torch.nn.Module]
    settings: dict[str, Any]
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = adamw(parameters, self.settings)

    def step(self, rate: float) -> float:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings["clip_grad"])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def rate(self, step: int) -> float:
        """A linear warm-up to the peak, then half a cosine or a line to the least rate at the last step."""
        s, last = self.settings, ACTOR["steps"]
        warm = s["lr_warmup_steps"] if s.get("lr_warmup_share") is None else round(s["lr_warmup_share"] * last)
        if step <= warm:
            return float(s["lr"] * step / warm)
        done = (step - warm) / (last - warm)
        height = (1 + math.cos(math.pi * done)) / 2 if s["lr_schedule"] == "cosine" else 1 - done
        least = s["lr"] * s["lr_min_ratio"]
        return float(least + (s["lr"] - least) * height)


class Job:
    """One case from beginning to end."""

    def __init__(self, case: str, actor: PreTrainedModel, critic: PreTrainedModel, reference: PreTrainedModel) -> None:
        sections = CASES[case]
        self.case, self.algorithm, self.learner = case, sections["algorithm"], sections["learner"]
        self.sections = sections
        self.actor, self.critic, self.reference = (
            copy.deepcopy(model).double() for model in (actor, critic, reference)
        )
        self.head = torch.nn.Linear(actor.config.hidden_size, 1, bias=False).double()
        torch.nn.init.zeros_(self.head.weight)
        self.actor_role = Role([self.actor], ACTOR)
        self.critic_role = Role([self.critic.model, self.head], sections["critic"]) if "critic" in sections else None
        self.beta = self.algorithm.get("kl_coefficient", 0.0)

    def run(self, step: int, batch: list[dict[str, Any]]) -> dict[str, float]:
        """One step; its record."""
        with torch.no_grad():
            columns: dict[str, Column] = {
                "old": [logprobs(self.actor, item)[0] for item in batch],
                "reference": [logprobs(self.reference, item)[0] for item in batch],
                "values": [self.values(item) for item in batch],
                "advantages": [torch.from_numpy(item["advantage"]).double() for item in batch],
            }
        record: dict[str, float] = {"lr": self.actor_role.rate(step)}
        if self.case == "ppo":
            columns |= self.gae(batch, columns)
            record["explained_variance"] = explained_variance(batch, columns)
        if self.case == "rloo":
            columns |= self.rloo(batch, columns)
        if self.case == "m2po":
            columns["kept"] = kept_tokens(batch, columns["old"], self.algorithm["importance_m2_threshold"])
        updates: list[tuple[int, dict[str, float]]] = []
        for part in self.parts(batch) * self.learner.get("ppo_epochs", 1):
            figures = self.update_critic(step, batch, part, columns) if self.critic_role else {}
            figures |= self.update_actor(step, batch, part, columns)
            updates.append((sum(int(batch[i]["loss_mask"].sum()) for i in part), figures))
        tokens = sum(n for n, _ in updates)
        record |= {name: sum(n * figures[name] for n, figures in updates) / tokens for name in updates[0][1]}
        record[LARGEST] = max(figures[LARGEST] for _, figures in updates)
        if self.beta:
            record["kl_coefficient"] = self.beta
        if self.critic_role:
            record["critic_lr"] = self.critic_role.rate(step)
        self.follow(step, len(batch), record)
        return record

    def parts(self, batch: list[dict[str, Any]]) -> list[list[int]]:
        """Places of the sequences of each mini-batch of two groups."""
        groups = sorted({item["group_id"] for item in batch})
        pairs = [groups[i : i + self.learner["mini_batch_size"]] for i in range(0, len(groups), 2)]
        return [[i for i, item in enumerate(batch) if item["group_id"] in pair] for pair in pairs]

    def follow(self, step: int, responses: int, record: dict[str, float]) -> None:
        """The adaptive coefficient, and the reference that follows the actor."""
        target = self.algorithm.get("kl_target")
        if target is not None:
            error = max(-0.2, min(0.2, record["reference_kl"] / target - 1))
            self.beta *= 1 + error * responses / self.algorithm["kl_horizon"]
        interval = self.sections.get("reference", {}).get("rebase_interval_steps")
        if interval is not None and step % interval == 0:
            self.reference.load_state_dict(self.actor.state_dict())

    def values(self, item: dict[str, Any]) -> torch.Tensor:
        """[R]: of each response token, from the hidden state that it is predicted from."""
        tokens = torch.from_numpy(item["tokens"]).long()
        hidden = self.critic.model(input_ids=tokens[None]).last_hidden_state[0, item["prompt_len"] - 1 : -1]
        values: torch.Tensor = self.head(hidden)[:, 0]
        return values

    def gae(self, batch: list[dict[str, Any]], columns: dict[str, Column]) -> dict[str, Column]:
        """Advantages, whitened over the batch, and returns: masked tokens are skipped as if they were not there."""
        gamma, lam = self.algorithm["gamma"], self.algorithm["lam"]
        advantages = [torch.zeros_like(values) for values in columns["values"]]
        returns = [torch.zeros_like(values) for values in columns["values"]]
        for i, item in enumerate(batch):
            places = np.flatnonzero(item["loss_mask"]).tolist()
            later_value = later_advantage = 0.0
            for t in reversed(places):
                reward = item["reward"] if t == places[-1] else 0.0
                reward -= self.beta * float(columns["old"][i][t] - columns["reference"][i][t])
                value = float(columns["values"][i][t])
                later_advantage = reward + gamma * later_value - value + gamma * lam * later_advantage
                later_value = value
                advantages[i][t], returns[i][t] = later_advantage, later_advantage + value
        counted = unmasked(batch, advantages)
        mean = sum(counted) / len(counted)
        scale = math.sqrt(sum((x - mean) ** 2 for x in counted) / (len(counted) - 1) + 1e-8)
        clip = self.algorithm["advantage_clip"]
        whitened = [((values - mean) / scale).clamp(-clip, clip) for values in advantages]
        return {"advantages": whitened, "returns": returns}

    def rloo(self, batch: list[dict[str, Any]], columns: dict[str, Column]) -> dict[str, Column]:
        """Rewards less the KL of the engine's policy, each against the mean of the others of its group."""
        scores = []
        for item, reference in zip(batch, columns["reference"], strict=True):
            apart = reference - torch.from_numpy(item["inference_logprobs"]).double()
            scores.append(item["reward"] - self.beta * sum(float(x) ** 2 / 2 for x in apart[item["loss_mask"]]))
        found = []
        for i, item in enumerate(batch):
            others = [s for k, s in enumerate(scores) if k != i and batch[k]["group_id"] == item["group_id"]]
            found.append(torch.full((len(item["loss_mask"]),), scores[i] - sum(others) / len(others)).double())
        return {"advantages": found}

    def update_critic(
        self, step: int, batch: list[dict[str, Any]], part: list[int], columns: dict[str, Column]
    ) -> dict[str, float]:
        """One optimizer step of the critic."""
        assert self.critic_role is not None
        clip, tokens = self.sections["critic"]["value_clip"], sum(int(batch[i]["loss_mask"].sum()) for i in part)
        figures = dict.fromkeys(("value_loss", "value_clip_fraction", "value_mean", "return_mean"), 0.0)
        for i in part:
            mask = torch.from_numpy(batch[i]["loss_mask"])
            if not mask.any():
                continue
            values, old, target = self.values(batch[i])[mask], columns["values"][i][mask], columns["returns"][i][mask]
            near = torch.minimum(torch.maximum(values, old - clip), old + clip)
            far_square, near_square = (values - target) ** 2, (near - target) ** 2
            loss = torch.maximum(far_square, near_square).sum() / 2 / tokens
            backward(loss)
            figures["value_loss"] += float(loss.detach())
            figures["value_clip_fraction"] += float((near_square > far_square).sum()) / tokens
            figures["value_mean"] += float(old.sum()) / tokens
            figures["return_mean"] += float(target.sum()) / tokens
        return figures | {"critic_grad_norm": self.critic_role.step(self.critic_role.rate(step))}

    def update_actor(
        self, step: int, batch: list[dict[str, Any]], part: list[int], columns: dict[str, Column]
    ) -> dict[str, float]:
        """One optimizer step of the actor."""
        tokens = sum(int(batch[i]["loss_mask"].sum()) for i in part)
        counting = sum(bool(batch[i]["loss_mask"].any()) for i in part)
        figures: dict[str, float] = {LARGEST: 0.0}
        for i in part:
            mask = torch.from_numpy(batch[i]["loss_mask"])
            if not mask.any():
                continue
            present, entropy = (column[mask] for column in logprobs(self.actor, batch[i]))
            weight = {
                "grpo": tokens / (counting * int(mask.sum())),
                "rloo": tokens / (counting * self.algorithm.get("constant_length", 1)),
            }.get(self.case, 1.0)
            known = {name: column[i][mask] for name, column in columns.items()}
            known["inference"] = torch.from_numpy(batch[i]["inference_logprobs"]).double()[mask]
            age = step - torch.from_numpy(batch[i]["versions"]).double()[mask]
            known["proximal"] = {
                "interpolated": known["inference"] + (1 - 1 / age) * (present.detach() - known["inference"]),
                "rloo": known["inference"],
            }.get(self.case, known["old"])
            losses, said = self.token_losses(present, entropy, known)
            backward((losses * weight).sum() / tokens)
            said |= {"loss": losses.detach() * weight, "entropy": entropy.detach()}
            apart = (present - known["inference"]).detach()
            said |= {"mismatch_kl_k1": -apart, "mismatch_kl_k3": apart.exp() - apart - 1}
            figures[LARGEST] = max(figures[LARGEST], float(apart.abs().max()))
            for name, values in said.items():
                figures[name] = figures.get(name, 0.0) + float(values.sum()) / tokens
        return figures | {"grad_norm": self.actor_role.step(self.actor_role.rate(step))}

    def token_losses(
        self, present: torch.Tensor, entropy: torch.Tensor, known: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of the unmasked tokens of one sequence, and their figures."""
        low, high = 1 - self.algorithm["clip_ratio_low"], 1 + self.algorithm["clip_ratio_high"]
        advantages, ratio = known["advantages"], torch.exp(present - known["proximal"])
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        said = {
            "clip_fraction_high": (advantages > 0) & (ratio > high),
            "clip_fraction_low": (advantages < 0) & (ratio < low),
        }
        apart = known["proximal"] - known["inference"]
        match self.case:
            case "grpo":
                said["importance_weight"] = torch.exp(apart.sum()).expand_as(apart)
            case "m2po":
                said["importance_weight"] = torch.exp(apart) * known["kept"]
                said["mask_fraction_positive"] = (known["kept"] == 0) & (advantages > 0)
                said["mask_fraction_negative"] = (known["kept"] == 0) & (advantages < 0)
            case "interpolated":
                said["importance_weight"] = torch.exp(apart).clamp(max=self.algorithm["importance_weight_cap"])
        if "importance_weight" in said:
            losses = losses * said["importance_weight"]
        if "reference" in self.sections:
            x = known["reference"] - present
            k3 = torch.exp(x) - x - 1
            said["reference_kl"] = k3.detach()
            if self.case == "grpo":
                losses = losses + self.beta * k3
        if self.case == "ppo":
            losses = losses - self.algorithm["entropy_coefficient"] * entropy
        return losses, said


def logprobs(model: PreTrainedModel, item: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response tokens, and entropies, [R] each."""
    tokens, prompt = torch.from_numpy(item["tokens"]).long(), item["prompt_len"]
    logits = model(input_ids=tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
    every = torch.log_softmax(logits, -1)
    return every[torch.arange(len(tokens) - prompt), tokens[prompt:]], -(every.exp() * every).sum(-1)


def kept_tokens(batch: list[dict[str, Any]], old: Column, threshold: float) -> Column:
    """1 for the tokens that M2PO keeps: the one furthest off is left out until the mean square of the rest is small enough."""
    squares = {
        (i, int(t)): float(old[i][t] - float(item["inference_logprobs"][t])) ** 2
        for i, item in enumerate(batch)
        for t in np.flatnonzero(item["loss_mask"])
    }
    while sum(squares.values()) / len(squares) > threshold:
        del squares[max(squares, key=lambda place: squares[place])]
    return [torch.tensor([float((i, t) in squares) for t in range(len(column))]) for i, column in enumerate(old)]


def explained_variance(batch: list[dict[str, Any]], columns: dict[str, Column]) -> float:
    values, returns = unmasked(batch, columns["values"]), unmasked(batch, columns["returns"])
    rest = [r - v for r, v in zip(returns, values, strict=True)]
    return 1 - float(np.var(rest) / np.var(returns))


def unmasked(batch: list[dict[str, Any]], column: Column) -> list[float]:
    return [float(x) for item, values in zip(batch, column, strict=True) for x in values[item["loss_mask"]]]


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def batches_of(model: PreTrainedModel) -> list[list[dict[str, Any]]]:
    """The batches, with an engine's log-probs near the model's own."""
    batches = [tokens_of(step) for step in range(1, STEPS + 1)]
    for item in (item for batch in batches for item in batch):
        with torch.no_grad():
            own = logprobs(model, item)[0].double().numpy()
        item["inference_logprobs"] = (own + item.pop("noise")).astype(np.float32)
    return batches


def near(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of the same architecture, not far from it."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return other


def main(root: Path) -> None:
    """Writes, per model: its directories, its batches, and of each job float64 records and trained weights."""
    torch.manual_seed(4)
    torch.set_num_threads(1)
    said: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in MODELS:
        actor = build(name, layers=2)
        roles = {"": actor, "-critic": near(actor), "-reference": near(actor)}
        for suffix, model in roles.items():
            model.save_pretrained(root / (name + suffix))
            (root / (name + suffix) / "tokenizer.json").write_text("{}")
        batches = batches_of(copy.deepcopy(actor).double())
        (root / f"{name}.batches.json").write_text(json.dumps(batches, default=lambda array: array.tolist()))
        said[name] = {}
        for case in CASES:
            job = Job(case, *roles.values())
            said[name][case] = [job.run(step, batch) for step, batch in enumerate(batches, 1)]
            weights = {
                k: v.contiguous() for k, v in job.actor.state_dict().items() if k != "lm_head.weight" or name == "qwen2"
            }
            save_file(weights, root / f"{name}.{case}.actor.safetensors")
            body = {f"model.{k}": v.contiguous() for k, v in job.critic.model.state_dict().items()}
            save_file(body | {"lm_head.weight": job.head.weight.detach()}, root / f"{name}.{case}.critic.safetensors")
    (root / "reference.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
