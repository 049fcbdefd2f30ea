"""What every rank of the tests runs: each layout that the number of ranks allows, one after the other. Rank 0 writes down what came out."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

from services.common.errors import ConfigError
from services.common.spec.job import JobSpec
from services.common.spec.learner import Recompute
from services.common.spec.rollout import DType
from services.common.streams.types import Int32Array
from services.learner.algorithms.losses import LossFunction, LossInputs
from services.learner.groups.sequence import Sequence
from services.learner.training.batch import MicroBatch
from services.learner.training.collectives import gather_json
from services.learner.training.context_parallel import all_tokens
from services.learner.training.trainer import Trainer
from tests.integration.learner.platforms import ON_CPU
from tests.integration.learner.trainer_cases import (
    ADAM,
    CLIP_HIGH,
    CLIP_LOW,
    MEASURED,
    MODELS,
    QUICK,
    STEPS,
    TEMPERATURE,
    WARMUP_STEPS,
    arrays,
)
from tests.integration.learner.trainer_cases import (
    LAYOUTS as SIZES,
)
from tests.integration.learner.trainers import (
    FSDP2,
    ON_FSDP2,
    actor_of,
    leads_data,
    output_layer_of,
    output_weight_of,
    run_layouts,
    state_tensors,
    trainer_of,
    whole_vocabulary,
)

torch.set_num_threads(1)


def variant(base: JobSpec, *, dtype: DType = DType.FLOAT32, fp32_output_layer: bool = False, **learner: Any) -> JobSpec:
    """The spec with another type, and other settings of the learner."""
    model = {"dtype": dtype, "fp32_output_layer": fp32_output_layer}
    return base.model_copy(
        update={"model": base.model.model_copy(update=model), "learner": base.learner.model_copy(update=learner)}
    )


DTYPES = (DType.FLOAT32, DType.BFLOAT16)
BASE = JobSpec.model_validate(
    {
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "rollout": {"temperature": TEMPERATURE},
        "learner": {"lr_warmup_steps": WARMUP_STEPS, "max_tokens_per_micro_batch": 96, "shared_prompts": False, **ADAM},
    }
)

LAYOUTS = {
    1: {"one": BASE, "fsdp": variant(BASE, backend=FSDP2)},
    2: {
        "fsdp_dp": variant(BASE, backend=FSDP2),
        "tp": variant(BASE, tensor_parallel_size=2),
        "pp": variant(BASE, pipeline_parallel_size=2),
        "dp": BASE,
        "dist": variant(BASE, use_distributed_optimizer=True),
        "sp": variant(BASE, tensor_parallel_size=2, sequence_parallel=True),
        "cp": variant(BASE, context_parallel_size=2, use_distributed_optimizer=True),
    },
    4: {
        "hybrid": variant(BASE, backend=FSDP2, fsdp_size=2),
        "sp_pp": variant(BASE, tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True),
        "sp_dist": variant(BASE, tensor_parallel_size=2, use_distributed_optimizer=True, sequence_parallel=True),
        "cp_sp": variant(BASE, context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True),
        "cp_pp": variant(BASE, context_parallel_size=2, pipeline_parallel_size=2),
        "cp_dp": variant(BASE, context_parallel_size=2, use_distributed_optimizer=True),
    },
}


def dapo(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A clipped surrogate; its metric is what a mean over tokens must come out as."""
    ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    return loss, {
        "advantage": inputs.advantages,
        "ordered": (inputs.sequence_ids.diff(prepend=inputs.sequence_ids[:1]) >= 0).float(),
    }


def broken(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that is not finite for one token."""
    loss, metrics = dapo(inputs)
    return loss * torch.where(inputs.sequence_ids == 0, torch.nan, 1.0), metrics


class _NanGradient(torch.autograd.Function):
    """The identity, whose gradient is not a number where told."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(where)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.where(ctx.saved_tensors[0], torch.nan, gradients[0]), None


def broken_gradient(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A finite loss whose gradient is not, for the first sequence of the first data-parallel rank alone."""
    first = torch.full_like(inputs.loss_mask, leads_data()) & (inputs.sequence_ids == 0)
    spoiled = _NanGradient.apply(inputs.trainer_logprobs, first)  # type: ignore[no-untyped-call]
    return dapo(replace(inputs, trainer_logprobs=spoiled))


def sequences(count: int = 11) -> list[Sequence]:
    """The shared batch."""
    return [Sequence(**item) for item in arrays(count)]


def whole_sequence(tokens: Int32Array) -> Sequence:
    """All tokens but the first as a response."""
    none = np.zeros(len(tokens) - 1, np.float32)
    return Sequence(tokens, 1, none, none, none.astype(bool), 0)


def logits_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All logits of every sequence, gathered: each sequence is asked for from its second token on."""
    found: dict[str, torch.Tensor] = {}
    whole = [whole_sequence(s.tokens) for s in sequences()]

    def keep(batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found[str(len(found))] = whole_vocabulary(trainer, all_tokens(logits, batch, trainer._backend.context_group))
        return logits.sum() * 0, torch.ones((), dtype=torch.int)

    with torch.no_grad():
        for s in whole:  # one at a time, and the same on every data-parallel rank
            batch = trainer._passes.prepare([s] * trainer.layout.dp_size)
            actor_of(trainer).model.run(batch.micro_batches, keep, forward_only=True)
    return found


def write_loaded(trainer: Trainer, path: Path) -> None:
    """The model before its first step: all logits and the export, in files whose names begin with `path`."""
    logits, exported = logits_of(trainer), trainer.export()
    if trainer.layout.reports_losses and trainer.layout.dp_rank == 0:
        save_file(logits, f"{path}.logits.safetensors")
    write(exported, Path(f"{path}.exported.safetensors"))


def scenario(name: str, spec: JobSpec, root: Path, out: Path) -> dict[str, Any]:
    """All that is asked of one layout."""
    said: dict[str, Any] = {}
    for model in MODELS:
        trainer = trainer_of(root / model, spec, dapo)
        write_loaded(trainer, out / f"{name}.{model}")
        trainer.save(out / f"{name}.{model}.saved", export=True)
        assert files_of(trainer)
        stats = [trainer.train(sequences()).as_record() for _ in range(STEPS)]
        said[model] = {"rows": stats}
        write(trainer.export(), out / f"{name}.{model}.rows.safetensors")
        trainer = trainer_of(root / model, variant(spec, shared_prompts=True), dapo)
        said[model]["shared"] = [trainer.train(sequences()).as_record() for _ in range(STEPS)]
        write(trainer.export(), out / f"{name}.{model}.shared.safetensors")
    llama = root / "llama"
    said["splits"] = [split(llama, s, out / f"{name}.split{i}.safetensors") for i, s in enumerate(splits(spec))]
    said["recomputed"] = [
        split(llama, s, out / f"{name}.recomputed{i}.safetensors") for i, s in enumerate(recomputed(spec))
    ]
    said["logprobs"] = [values.tolist() for values in trainer_of(llama, spec, dapo).logprobs(sequences())]
    said["shared_logprobs"] = [
        values.tolist() for values in trainer_of(llama, variant(spec, shared_prompts=True), dapo).logprobs(sequences())
    ]
    spec = variant(spec, shared_prompts=True)
    said["resume"] = {
        dtype: resume(root / "qwen3", variant(spec, dtype=dtype), out / f"{name}.{dtype}") for dtype in DTYPES
    }
    said["beginnings"] = {
        dtype: beginnings(root / "qwen3", variant(spec, dtype=dtype), out / f"{name}.{dtype}.begun") for dtype in DTYPES
    }
    said["broken"] = step_over_a_broken_batch(llama, spec, broken)
    said["broken_gradient"] = step_over_a_broken_batch(llama, spec, broken_gradient)
    said["output_layer"] = {
        model: [
            output_layer(root / model, variant(spec, dtype=DType.BFLOAT16, fp32_output_layer=fp32))
            for fp32 in (False, True)
        ]
        for model in ("llama", "qwen2")
    }
    said["lonely"] = trainer_of(llama, spec, dapo).train(sequences(1)).as_record()
    said["refused"] = refusal(root / "qwen3", spec, out / f"{name}.float32" / "saved")
    said["memory"] = {
        way: [memory(llama, variant(spec, shared_prompts=way == "shared"), tokens) for tokens in lengths]
        for way, lengths in (MEASURED.get(name, {}) if ON_CPU else {}).items()
    }
    return said


def memory(model: Path, spec: JobSpec, tokens: int) -> dict[str, int]:
    """Bytes that torch's allocator gives out within a step on one row: at most at once, and for one tensor or buffer of a kernel.

    The least of some steps: a collective's thread that frees its buffers late raises a step's peak.
    """
    steps = [_step_memory(model, spec, tokens) for _ in range(3)]
    return {name: min(step[name] for step in steps) for name in ("peak", "largest")}


def _step_memory(model: Path, spec: JobSpec, tokens: int) -> dict[str, int]:
    trainer = trainer_of(model, variant(spec, max_tokens_per_micro_batch=tokens), dapo)
    batch = long_group(tokens, 3 if spec.learner.shared_prompts else 1)
    gc.collect()  # an earlier trainer that ends within the step would lower its peak
    gc.disable()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        stats = trainer.train(batch)
    gc.enable()
    assert (stats.skipped, stats.micro_batches) == ("", 1)
    events: Any = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    return {"peak": int(np.cumsum(sizes).max()), "largest": max(sizes)}


def long_group(tokens: int, responses: int) -> list[Sequence]:
    """A prompt of a quarter of the computed tokens, and responses with the rest."""
    rng = np.random.default_rng(7)
    prompt, each = tokens // 4, tokens * 3 // 4 // responses
    numbers = rng.integers(0, 128, (responses, each)).astype(np.int32)
    logprobs, advantage = np.full(each, -4.9, np.float32), np.ones(each, np.float32)
    first = rng.integers(0, 128, prompt).astype(np.int32)
    return [
        Sequence(np.concatenate([first, own]), prompt, logprobs, advantage, np.ones(each, bool), 0) for own in numbers
    ]


def output_layer(model: Path, spec: JobSpec) -> dict[str, float]:
    """How far logits lie from the exact product of what the output layer was given, on the last stage; and a step's figures."""
    trainer = trainer_of(model, spec, dapo)
    given: list[torch.Tensor] = []
    layer, weight = output_layer_of(trainer), output_weight_of(trainer) if trainer.layout.is_last_stage else None
    if layer is not None:
        layer.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().flatten(0, 1)))
    error = rounded = 0.0

    def look(_: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal error, rounded
        assert weight is not None
        exact = given[-1].double() @ weight.double().T
        error = max(error, float((logits.double() - exact).abs().max()))
        rounded = max(rounded, float((logits - logits.bfloat16()).abs().max()))
        return logits.sum() * 0, torch.ones((), dtype=torch.int)

    with torch.no_grad():
        actor_of(trainer).model.run(trainer._passes.prepare(sequences()).micro_batches, look, forward_only=True)
    stats = trainer.train(sequences())
    mine = {"error": error, "rounded": rounded, "loss": stats.loss, "grad_norm": stats.grad_norm}
    return max(gather_json(mine, trainer.device), key=lambda item: item["error"])


def splits(spec: JobSpec) -> list[JobSpec]:
    """The same step, split in other ways: one micro-batch, nearly one per sequence, packed small, packed large, prompts shared."""
    ranks = spec.learner.context_parallel_size  # each counts its own tokens
    rows = [
        variant(spec, max_tokens_per_micro_batch=tokens // ranks, packing=packing)
        for tokens, packing in ((4096, False), (40, False), (80, True), (4096, True))
    ]
    return rows + [
        variant(spec, max_tokens_per_micro_batch=tokens // ranks, shared_prompts=True) for tokens in (40, 60, 4096)
    ]


def recomputed(spec: JobSpec) -> list[JobSpec]:
    """The same step, with activations computed again, with shared prompts and by rows."""
    return [
        variant(spec, recompute=recompute, shared_prompts=shared)
        for recompute in (Recompute.SELECTIVE, Recompute.FULL)
        for shared in (True, False)
    ]


def split(model: Path, spec: JobSpec, path: Path) -> dict[str, Any]:
    """One step under these settings."""
    trainer = trainer_of(model, spec, dapo)
    stats = trainer.train(sequences()).as_record()
    write(trainer.export(), path)
    return stats


def resume(model: Path, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Whether save → load → continue ends in the very weights of the run that was not interrupted."""
    straight = trainer_of(model, spec, dapo)
    straight.train(sequences(9))
    straight.save(folder / "saved")
    expected = straight.train(sequences()).as_record()  # while the checkpoint is being written
    files_of(straight)
    noise = draw(straight)
    restarted = trainer_of(model, spec, dapo)
    torch.rand(17), torch.rand(5, device=straight.device), random.random(), np.random.random(5)
    restarted.load(folder / "saved")
    steps = restarted.step
    got = restarted.train(sequences()).as_record()
    a, b = actor_of(straight).model.gather(None), actor_of(restarted).model.gather(None)
    return {
        "steps": steps,
        "stats": got == expected,
        "weights": a is None or b is None or all(torch.equal(a[k], b[k]) for k in a),
        "random": noise == draw(restarted),
        "moved": a is None
        or any(not torch.equal(v, w) for v, w in zip(a.values(), _fresh(model, spec).values(), strict=True)),
    }


def draw(trainer: Trainer) -> list[float]:
    """Numbers from every generator of this process."""
    of_device = float(torch.rand(1, device=trainer.device))
    return [float(torch.rand(1)), of_device, random.random(), random.gauss(), float(np.random.random())]


def files_of(trainer: Trainer) -> list[str]:
    """The files that all ranks wrote; fails with the first error."""
    reports = trainer.saved(wait=True)
    while reports is None:
        reports = trainer.saved(wait=True)
    assert not any(report["error"] for report in reports), reports
    return [file["name"] for report in reports for file in report["files"]]


def beginnings(model: Path, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """What is taken of a checkpoint that is loaded in part; `straight` went on from it whole, other trainers are new."""
    straight = trainer_of(model, spec, dapo)
    straight.train(sequences(9))
    straight.save(folder, export=True)
    files_of(straight)
    saved, moments = gathered(straight), moments_of(straight)
    noise = draw(straight)
    said: dict[str, Any] = {}
    for kind in ("no_load_optim", "no_load_rng", "finetune", "hugging_face"):
        trainer = trainer_of(model, spec, dapo)
        fresh = moments_of(trainer)
        torch.manual_seed(99)
        match kind:
            case "no_load_optim":
                trainer.load(folder, optimizer=False)
            case "no_load_rng":
                trainer.load(folder, rng=False)
            case "finetune":
                trainer.load_weights(folder, hugging_face=False)
            case _:
                trainer.load_weights(folder / "hf", hugging_face=True)
        said[kind] = {
            "step": trainer.step,
            "weights": gathered(trainer) == saved,
            "optimizer": moments_of(trainer) == moments,
            "fresh_optimizer": moments_of(trainer) == fresh,
            "random": draw(trainer) == noise,
        }
        stats = trainer.train(sequences())
        said[kind]["trains"] = stats.skipped == "" and gathered(trainer) != saved
    return said


def gathered(trainer: Trainer) -> str:
    """A digest of the weights, on every rank."""
    weights = actor_of(trainer).model.gather(None)
    mine = digest(weights.values()) if weights is not None else ""
    return str(gather_json(mine, trainer.device)[0])


def moments_of(trainer: Trainer) -> list[str]:
    """A digest of each rank's moments."""
    kept = [
        value
        for name, value in sorted(state_tensors(trainer).items())
        if name.startswith("optimizer.") and "master" not in name
    ]
    return gather_json(digest(kept), trainer.device)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of their bytes."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def _fresh(model: Path, spec: JobSpec) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return {
        k: v.to(torch.bfloat16 if spec.model.dtype is DType.BFLOAT16 else torch.float32)
        for k, v in sorted(weights.items())
    }


def step_over_a_broken_batch(model: Path, spec: JobSpec, loss: LossFunction) -> dict[str, Any]:
    """A step that is not finite, and a good one after it; what every rank holds afterwards, weights and moments."""
    trainer = trainer_of(model, spec, loss)
    before = trainer.export()
    bad = trainer.train(sequences()).as_record()
    after = trainer.export()
    skips = gather_json(bad["skipped"], trainer.device)
    actor_of(trainer).loss_fn = dapo
    good = trainer.train(sequences()).as_record()
    unchanged = before is None or after is None or all(torch.equal(before[k], after[k]) for k in before)
    return {"bad": bad, "good": good, "unchanged": unchanged, "skips": skips}


def refusal(model: Path, spec: JobSpec, folder: Path) -> str:
    """What loading says under settings that the checkpoint was not saved with."""
    trainer = trainer_of(model, variant(spec, dtype=DType.BFLOAT16), dapo)
    if (
        ON_FSDP2
    ):  # float32 weights are its masters, whatever it computes in: another back end's files are what it cannot take
        folder = folder.parents[1] / "one.qwen3.saved"
    try:
        trainer.load(folder)
    except ConfigError as error:
        return str(error)
    return ""


def write(weights: dict[str, torch.Tensor] | None, path: Path) -> None:
    """On rank 0."""
    if weights is not None:
        save_file(weights, path)


def main(root: Path, *, everything: bool) -> None:
    """The layouts of this number of ranks."""
    specs = LAYOUTS[int(os.environ["WORLD_SIZE"])]
    run_layouts(root, SIZES, QUICK, lambda name: scenario(name, specs[name], root, root / "out"), everything=everything)


if __name__ == "__main__":
    main(Path(sys.argv[1]), everything="everything" in sys.argv)
