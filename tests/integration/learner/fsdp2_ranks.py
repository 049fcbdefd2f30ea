"""What every rank of FSDP2's own tests runs; rank 0 writes down what came out.

architectures   against transformers' own attention, one rank
adapters        what is trained, published, exported and resumed
checkpoints     saved by two ranks, loaded by one and by two
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.errors import ConfigError
from services.common.spec.job import JobSpec
from services.learner.groups.sequence import Sequence
from services.learner.training.collectives import gather_json
from services.learner.training.trainer import Trainer
from tests.integration.learner.fsdp2_cases import ARCHITECTURES, REFUSED
from tests.integration.learner.platforms import RANKS
from tests.integration.learner.trainer_cases import TEMPERATURE, VOCABULARY, arrays
from tests.integration.learner.trainer_ranks import BASE, dapo, files_of, variant
from tests.integration.learner.trainers import FSDP2, actor_of, digest, state_tensors, trainer_of

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": VOCABULARY, "max_position_embeddings": 256,
}  # fmt: skip
RANK, ALPHA = 4, 8


def sequences() -> list[Sequence]:
    return [Sequence(**item) for item in arrays()]


def spec_of(*, lora: bool = False, shared: bool = True, **learner: Any) -> JobSpec:
    """The batch's job on FSDP2."""
    base = variant(BASE, backend=FSDP2, shared_prompts=shared, **learner)
    document = base.model_dump(mode="json")
    if lora:
        document["model"]["lora"] = {"rank": RANK, "alpha": ALPHA}
        document["learner"] |= {"lr": 0.05, "adam_eps": 1e-8, "clip_grad": 0.0}
    return JobSpec.model_validate(document)


def make_model(name: str, folder: Path) -> None:
    """A random model: norms and biases too."""
    torch.manual_seed(3)
    differences = ARCHITECTURES[name] if name in ARCHITECTURES else REFUSED[name][0]
    config = AutoConfig.for_model(name, **(SIZES | differences))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)


def against_transformers(name: str, root: Path, *, shared: bool) -> dict[str, Any]:
    """Differences of log-probs and gradients to the model with transformers' eager attention, sequence by sequence, in float64."""
    trainer = trainer_of(root / name, spec_of(shared=shared), dapo)
    batch = sequences()
    plain = AutoModelForCausalLM.from_pretrained(root / name, attn_implementation="eager", dtype=torch.float64)
    expected = []
    for s in batch:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        logits = plain(tokens[None], use_cache=False).logits[0, s.prompt_len - 1 : -1] / TEMPERATURE
        expected.append(logits.log_softmax(-1).gather(-1, tokens[s.prompt_len :, None])[:, 0])
    found = trainer.logprobs(batch)
    wrong = max(float(np.abs(e.detach().numpy() - f).max()) for e, f in zip(expected, found, strict=True))
    torch.cat(expected).sum().backward()  # type: ignore[no-untyped-call]
    actor: Any = actor_of(trainer)
    prepared = trainer._passes.prepare(batch)
    actor.model.optimizer.zero_grad()
    actor.model.run(
        prepared.micro_batches,
        lambda b, logits: (actor._logprobs(b, logits)[0].sum(), torch.tensor(len(b.targets), dtype=torch.int)),
        forward_only=False,
    )
    count = sum(s.response_len for s in batch)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    errors = [
        float((p.grad.full_tensor().cpu().double() * count - gradients[name]).norm() / gradients[name].norm())
        for name, p in actor.model.sharded.items()
        if float(gradients[name].norm()) > 1e-6
    ]
    return {"logprobs": wrong, "gradients": max(errors), "compared": len(errors)}


def adapters(root: Path, out: Path) -> dict[str, Any]:
    """The course of a job with adapters."""
    model = root / "llama"
    source = load_file(model / "model.safetensors")
    trainer = trainer_of(model, spec_of(lora=True), dapo)
    first = trainer.export()
    stats = [trainer.train(sequences()).as_record() for _ in range(3)]
    trained = trainer.export()
    logprobs = trainer.logprobs(sequences())
    trainer.save(out, export=True)
    files = files_of(trainer)
    expected, random = trainer.train(sequences()).as_record(), float(torch.rand(1))
    restarted = trainer_of(model, spec_of(lora=True), dapo)
    restarted.load(out)
    again = restarted.train(sequences()).as_record(), float(torch.rand(1))
    said = {
        "stats": stats,
        "resumed": again == (expected, random),
        "digests": digest_of(trainer) == digest_of(restarted),
        "logprobs": [values.tolist() for values in logprobs],
        "files": files,
    }
    if first is not None and trained is not None:
        said["initial"] = all(torch.equal(first[name], tensor) for name, tensor in source.items())
        said["changed"] = sorted(name for name in first if not torch.equal(first[name], trained[name]))
        said["bytes"] = (out / "rank-00000.safetensors").stat().st_size
    said["whole"] = refusal(trainer_of(model, spec_of(), dapo), out)
    return said


def peft_says(root: Path, out: Path) -> dict[str, Any]:
    """What transformers and peft make of an export: the merged weights, and the initial ones with the adapters."""
    from peft import PeftModel

    merged = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(out / "adapter"))
    return {"merged": scores(merged), "adapted": scores(adapted)}


def scores(model: Any) -> list[list[float]]:
    """Log-probs of every response."""
    found = []
    for s in sequences():
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, s.prompt_len - 1 : -1] / TEMPERATURE
        found.append(logits.log_softmax(-1).gather(-1, tokens[s.prompt_len :, None])[:, 0].tolist())
    return found


def why_not(name: str, root: Path) -> str:
    """Why an architecture is not trained."""
    make_model(name, root / name)
    try:
        trainer_of(root / name, spec_of(), dapo)
    except ConfigError as error:
        return str(error)
    return ""


def refusal(trainer: Trainer, folder: Path) -> str:
    """What loading says."""
    try:
        trainer.load(folder)
    except ConfigError as error:
        return str(error)
    return ""


def digest_of(trainer: Trainer) -> list[str]:
    """Of all that the ranks would save."""
    mine = "".join(
        f"{name}{digest(tensor)}"
        for name, tensor in sorted(state_tensors(trainer).items())
        if not name.startswith("rng.")
    )
    return gather_json(mine, trainer.device)


def checkpoints(root: Path, out: Path) -> dict[str, Any]:
    """Two ranks save; whoever loads says what the next step is."""
    model, saved = root / "qwen3", out / "two-ranks"
    trainer = trainer_of(model, spec_of(), dapo)
    if dist.get_world_size() == 2:
        trainer.train(sequences())
        trainer.save(saved)
        assert files_of(trainer)
    trainer = trainer_of(model, spec_of(), dapo)
    trainer.load(saved)
    return {"step": trainer.step, "next": trainer.train(sequences()).as_record()}


def main(root: Path) -> None:
    """Two ranks first, whose checkpoint one rank then loads."""
    torch.set_num_threads(1)
    ranks, out = int(sys.argv[3]), root / "out"
    out.mkdir(exist_ok=True)
    said: dict[str, Any] = {
        "adapters": adapters(root, out / f"adapters-{ranks}"),
    }
    if 2 in RANKS:
        said["checkpoints"] = checkpoints(root, out)
    if ranks == 1:
        said["peft"] = peft_says(root, out / "adapters-1")
        said["refused"] = {name: why_not(name, root) for name in REFUSED}
        for name in ARCHITECTURES:
            make_model(name, root / name)
            said[name] = {way: against_transformers(name, root, shared=way == "shared") for way in ("shared", "joined")}
    if dist.get_rank() == 0:
        (out / f"fsdp2-{ranks}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
