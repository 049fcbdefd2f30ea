"""What every rank of the tests of roles runs: each layout that the number of ranks allows. Rank 0 writes down what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.common.models.roles import RoleModels
from services.common.spec.job import JobSpec
from services.learner.groups.sequence import Sequence
from services.learner.ranks.loop import build_trainer
from services.learner.training.collectives import gather_json
from services.learner.training.rank_file import rank_file
from services.learner.training.trainer import Trainer
from tests.integration.learner.platforms import PLATFORM
from tests.integration.learner.roles_cases import ACTOR, CASES, DTYPES, QUICK_DTYPES, TEMPERATURE
from tests.integration.learner.trainer_cases import LAYOUTS, QUICK
from tests.integration.learner.trainers import (
    ON_FSDP2,
    digest,
    gathered,
    head_of,
    held_parts,
    masters_follow,
    run_layouts,
    state_tensors,
)

torch.set_num_threads(1)

TP, PP, DIST = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"use_distributed_optimizer": True}
SEQUENCE, CONTEXT = TP | {"sequence_parallel": True}, {"context_parallel_size": 2}
SIZES: dict[str, dict[str, Any]] = {
    "one": {}, "tp": TP, "pp": PP, "dp": {}, "dist": DIST, "sp": SEQUENCE, "cp": CONTEXT | DIST,
    "sp_pp": SEQUENCE | PP, "sp_dist": SEQUENCE | DIST, "cp_sp": CONTEXT | SEQUENCE, "cp_pp": CONTEXT | PP, "cp_dp": CONTEXT | DIST,
    "fsdp": {"backend": "fsdp2"}, "fsdp_dp": {"backend": "fsdp2"},
    "hybrid": {"backend": "fsdp2", "fsdp_size": 2, "data_parallel_size": 4},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"shared_prompts": False, "max_tokens_per_micro_batch": 64},
    "shared": {"max_tokens_per_micro_batch": 64},
    "small": {"max_tokens_per_micro_batch": 24},
    "large": {"max_tokens_per_micro_batch": 4096},
}
"""Divisions of a batch into micro-batches."""
EVERY_CASE = [(case, model, "rows") for case in CASES for model in ("llama", "qwen2")]
DIVISIONS = [("ppo", "llama", way) for way in ("shared", "small", "large")] + [("grpo", "llama", "small")]
QUICK_CASES = [("ppo", "llama", "shared"), ("ppo", "qwen2", "small"), ("grpo", "qwen2", "shared")]
SOME_CASES = [
    ("ppo", "llama", "rows"), *QUICK_CASES, ("m2po", "llama", "small"), ("interpolated", "qwen2", "rows"), ("rloo", "llama", "shared"),
]  # fmt: skip
"""What more than one rank trains, and one rank in tests that are not slow."""


def spec_of(case: str, sizes: dict[str, Any], way: str = "large", dtype: str = "float32", **sections: Any) -> JobSpec:
    """A case's job; `sections` change some of its settings, or leave out a section that is None."""
    parts = CASES[case]
    algorithm = {"filter_groups_train_batch_size": 4, "filter_groups_enable": False, "kl_coefficient": 0.0}
    spec: dict[str, Any] = {
        "model": {"path": "tiny", "dtype": dtype},
        "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "rollout": {"temperature": TEMPERATURE},
        **parts,
        "algorithm": algorithm | parts["algorithm"],
        "learner": ACTOR | parts["learner"] | WAYS[way] | sizes,
    }
    for name, changes in sections.items():
        spec[name] = None if changes is None else spec.get(name, {}) | changes
    return JobSpec.model_validate(spec)


class Bench:
    """The models and batches of one layout."""

    def __init__(self, root: Path, sizes: dict[str, Any]) -> None:
        self.root, self.sizes, self.out = root, sizes, root / "out"

    def models(self, name: str) -> RoleModels:
        critic, reference = (self.root / f"{name}-{role}" for role in ("critic", "reference"))
        return RoleModels(self.root / name, critic, reference)

    def batches(self, name: str) -> list[list[Sequence]]:
        """The batches that the reference process wrote, as the learner's head gives them to its ranks."""
        written = json.loads((self.root / f"{name}.batches.json").read_text())
        types = {
            "tokens": np.int32, "inference_logprobs": np.float32, "advantage": np.float32, "loss_mask": np.bool_,
            "versions": np.int32,
        }  # fmt: skip
        return [
            [Sequence(**{k: np.array(v, types[k]) if k in types else v for k, v in item.items()}) for item in batch]
            for batch in written
        ]

    def build(self, spec: JobSpec, models: RoleModels | None = None) -> Trainer:
        return build_trainer(spec, models or self.models("llama"), PLATFORM)


def follow_the_reference(bench: Bench, name: str, cases: list[tuple[str, str, str]]) -> dict[str, Any]:
    """The records of every step, and whether the copies of one parameter on several ranks are equal bit for bit afterwards."""
    said = {}
    for case, model, way in cases:
        trainer = bench.build(spec_of(case, bench.sizes, way), bench.models(model))
        records = [trainer.train(batch).as_record() for batch in bench.batches(model)]
        said[f"{case} {model} {way}"] = {"records": records, "copies_differ": copies_that_differ(trainer)}
        path = f"{name}.{model}.{case}.{way}"
        write(trainer.export(), bench.out / f"{path}.actor.safetensors")
        if trainer._critic is not None:
            write(critic_of(trainer), bench.out / f"{path}.critic.safetensors")
    return said


def critic_of(trainer: Trainer) -> dict[str, torch.Tensor] | None:
    """The critic under its Hugging Face names, the head as the output layer, on rank 0."""
    assert trainer._critic is not None
    return gathered(trainer._critic.model)


def copies_that_differ(trainer: Trainer) -> list[str]:
    """Parameters of any role that are not the same on two ranks that hold the same part of them."""
    held: dict[str, set[str]] = {}
    for part in gather_json(held_parts(trainer), trainer.device):
        for name, found in part.items():
            held.setdefault(name, set()).add(found)
    heads = sum("critic.model.output_layer" in name for name in held)
    assert ON_FSDP2 or heads == (trainer._critic is not None), "the head is whole on every rank of the last stage"
    return [name for name, digests in held.items() if len(digests) > 1]


def continue_from_a_checkpoint(bench: Bench, folder: Path, dtype: str) -> dict[str, bool]:
    """Whether a job that is loaded ends where the one goes that is not interrupted; it is saved between two rebases of its reference."""
    batches = bench.batches("llama")
    spec = spec_of("ppo", bench.sizes, dtype=dtype)
    straight = bench.build(spec)
    for batch in batches:
        straight.train(batch)
    straight.save(folder)
    before = state_of(straight)
    expected = straight.train(batches[1]).as_record()
    files_of(straight)
    restarted = bench.build(spec)
    restarted.load(folder)
    loaded = state_of(restarted)
    found = restarted.train(batches[1]).as_record()
    after = state_of(straight)
    return {
        "loaded": loaded == before,
        "record": found == expected,
        "state": state_of(restarted) == after,
        "coefficient": restarted._kl_coefficient == straight._kl_coefficient != spec.algorithm.kl_coefficient,
        "moved": {name.partition(".")[0] for name in changed(before, after)} == {"model", "optimizer", "critic", "reference"},
    }  # fmt: skip


def begin_with_a_checkpoint_without_roles(bench: Bench, folder: Path, dtype: str) -> dict[str, Any]:
    """What critic and reference are of a job that begins with the checkpoint of one that has none; and the other way round."""
    batch = bench.batches("llama")[0]
    plain_spec = spec_of("m2po", bench.sizes, dtype=dtype)
    plain = bench.build(plain_spec)
    plain.train(batch)
    plain.save(folder)
    files_of(plain)
    saved, spec = state_of(plain), spec_of("ppo", bench.sizes, dtype=dtype)
    said: dict[str, Any] = {"unprefixed": not any(name.startswith(("critic", "reference")) for name in saved)}
    begins: dict[str, Callable[[Trainer], None]] = {
        "load": lambda trainer: trainer.load(folder),
        "no_load_optim": lambda trainer: trainer.load(folder, optimizer=False),
        "finetune": lambda trainer: trainer.load_weights(folder, hugging_face=False),
    }
    for way, begin in begins.items():
        copying, own = bench.build(spec, RoleModels(bench.root / "llama")), bench.build(spec)
        initial = state_of(own)
        begin(copying)
        begin(own)
        state, with_directories = state_of(copying), state_of(own)
        weights = {k: v for k, v in saved.items() if k.startswith("model.")}
        masters = {k: v for k, v in state.items() if k.endswith(".master")}
        said[way] = {
            "actor": is_within(weights if way != "load" else saved, state),
            "critic": is_within(of_role("critic", weights, but="output_layer"), state),
            "head": head_is_zero(copying),
            "reference": is_within(of_role("reference", weights), state),
            "own": is_within({k: v for k, v in initial.items() if k.startswith(("critic.", "reference."))}, with_directories),
            "masters": masters_follow(copying) and bool(masters) is (dtype == "bfloat16"),
            "coefficient": copying._kl_coefficient == spec.algorithm.kl_coefficient > 0,
            "trains": copying.train(batch).skipped == "",
        }  # fmt: skip
    with_roles = bench.build(spec)
    with_roles.train(batch)
    with_roles.save(folder / "roles")
    files_of(with_roles)
    without = bench.build(plain_spec)
    without.load(folder / "roles")
    actor = {k: v for k, v in state_of(with_roles).items() if k.startswith(("model.", "optimizer."))}
    said["back"] = state_of(without) == actor
    names = [names_in(path / rank_file(with_roles.layout.rank)) for path in (folder, folder / "roles")]
    said["names"] = names[0] == [name for name in names[1] if not name.startswith(("critic.", "reference."))]
    return said


def warm_the_critic_up(bench: Bench) -> list[dict[str, Any]]:
    """Of each of three steps, the first two of which train only the critic: its record, and the roles that it changed."""
    trainer = bench.build(
        spec_of("ppo", bench.sizes, critic={"warmup_steps": 2}, reference={"rebase_interval_steps": 5})
    )
    steps = []
    for batch in bench.batches("llama"):
        before = state_of(trainer)
        record = trainer.train(batch).as_record()
        roles = {name.partition(".")[0] for name in changed(before, state_of(trainer))}
        steps.append({"record": record, "changed": sorted(set().union(*gather_json(sorted(roles), trainer.device)))})
    return steps


def step_over_a_broken_critic(bench: Bench) -> dict[str, Any]:
    """A step whose values are not numbers: what it says on every rank, and whether it left all weights and moments as they were."""
    trainer = bench.build(spec_of("ppo", bench.sizes, reference={"rebase_interval_steps": 5}))
    batches = bench.batches("llama")
    trainer.train(batches[0])
    assert trainer._critic is not None
    head = head_of(trainer)
    if head is not None and len(head):
        with torch.no_grad():
            head[0, 0] = torch.nan
    before = state_of(trainer)
    record = trainer.train(batches[1]).as_record()
    unchanged = state_of(trainer) == before
    return {"skips": gather_json(record["skipped"], trainer.device), "unchanged": unchanged, "record": record}


def rebase_at_a_step_without_a_token(bench: Bench) -> dict[str, Any]:
    """What a step changes whose batch has no token to train on, and at which the reference is due to follow the actor."""
    trainer = bench.build(spec_of("ppo", bench.sizes, reference={"rebase_interval_steps": 2}))
    first, second, *_ = bench.batches("llama")
    trainer.train(first)
    before = state_of(trainer)
    record = trainer.train([replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in second]).as_record()
    after = state_of(trainer)
    weights = {name: found for name, found in after.items() if name.startswith("model.")}
    return {
        "skipped": record["skipped"],
        "roles": sorted({name.partition(".")[0] for name in changed(before, after)}),
        "follows": is_within(of_role("reference", weights), after),
    }


def state_of(trainer: Trainer) -> dict[str, str]:
    """Digests of all that this rank would save, but the random states."""
    return {name: digest(tensor) for name, tensor in state_tensors(trainer).items() if not name.startswith("rng.")}


def changed(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Names of what is not as it was."""
    return (name for name in after if before.get(name) != after[name])


def of_role(role: str, actor: dict[str, str], but: str = "no parameter") -> dict[str, str]:
    """The actor's digests under the names of a role, which has no output layer of its own where `but` says so."""
    return {f"{role}.{name}": found for name, found in actor.items() if but not in name}


def is_within(part: dict[str, str], whole: dict[str, str]) -> bool:
    return part.items() <= whole.items()


def head_is_zero(trainer: Trainer) -> bool:
    head = head_of(trainer)
    return head is None or not head.any()


def names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return sorted(file.keys())


def files_of(trainer: Trainer) -> None:
    """Waits until all ranks have written; fails with the first error."""
    reports = trainer.saved(wait=True)
    while reports is None:
        reports = trainer.saved(wait=True)
    assert not any(report["error"] for report in reports), reports


def on_every_rank(said: dict[str, Any]) -> dict[str, Any]:
    """Facts that must hold on all ranks."""
    parts = gather_json(said, torch.device("cpu"))
    return {k: all(part[k] for part in parts) if isinstance(v, bool) else on_every_rank(v) for k, v in said.items()}


def write(weights: dict[str, torch.Tensor] | None, path: Path) -> None:
    """On rank 0."""
    if weights is not None:
        save_file(weights, path)


def scenario(name: str, bench: Bench, *, everything: bool) -> dict[str, Any]:
    """All that is asked of one layout."""
    whole = everything or name == "one"
    cases = SOME_CASES if whole else QUICK_CASES
    if everything and name == "one":
        cases = [*EVERY_CASE, *DIVISIONS]
    said: dict[str, Any] = {
        "trained": follow_the_reference(bench, name, cases),
        "warm_up": warm_the_critic_up(bench),
        "broken": step_over_a_broken_critic(bench),
        "no token": rebase_at_a_step_without_a_token(bench),
    }
    for key, check in {"continued": continue_from_a_checkpoint, "begun": begin_with_a_checkpoint_without_roles}.items():
        said[key] = {
            dtype: on_every_rank(check(bench, bench.out / f"{name}.{key}.{dtype}", dtype))
            for dtype in (DTYPES if whole else QUICK_DTYPES)
        }
    return said


def main(root: Path, *, everything: bool) -> None:
    """The layouts of this number of ranks."""
    run_layouts(
        root,
        LAYOUTS,
        QUICK,
        lambda name: scenario(name, Bench(root, SIZES[name]), everything=everything),
        everything=everything,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), everything="everything" in sys.argv)
