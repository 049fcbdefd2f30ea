"""What every rank of the tests of layouts runs: a checkpoint is loaded in one layout after the other. Rank 0 writes down what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services.common.errors import ConfigError
from services.learner.groups.sequence import Sequence
from services.learner.megatron.weights import Exporter
from services.learner.training.rank_file import rank_file
from services.learner.training.trainer import Trainer
from tests.integration.learner.layouts_cases import CASES, CHAINS, QUICK_CASES, STEPS, batch_of
from tests.integration.learner.roles_ranks import SIZES, Bench, files_of, on_every_rank, spec_of, state_of
from tests.integration.learner.trainers import forget_groups, roles_of

torch.set_num_threads(1)

SETS = {1: "one", 2: "two", 4: "four"}
STATES = ("exp_avg", "exp_avg_sq")


def folders(out: Path, case: str) -> list[Path]:
    """Every checkpoint of a case, in the order of the layouts."""
    return [
        out / f"{case}.{chain}.{place}.{name}" for chain, names in CHAINS.items() for place, name in enumerate(names)
    ]


def step(trainer: Trainer, number: int) -> dict[str, Any]:
    """Trains a step; its record."""
    return trainer.train([Sequence(**item) for item in batch_of(number)]).as_record()


def consolidated(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and float32 moments of all roles under Hugging Face names, on rank 0, by Megatron's own gathering; spoils the trainer.

    Moments are put where the optimizer keeps its weights, from where Megatron spreads them over the ranks like weights after a step.
    """
    found: dict[str, torch.Tensor] = {}
    for role in roles_of(trainer):
        for kind in ("weight", *(STATES if role.optimizer is not None else ())):
            if kind != "weight":
                with torch.no_grad():
                    for _, part, _, parameter in role.groups():
                        parameter.copy_(part.state[parameter][kind])
                if trainer._spec.learner.use_distributed_optimizer:
                    role.part.model.start_param_sync(force_sync=True)
            gathered = Exporter(role.part, trainer.layout, trainer.device).gather(None) or {}
            found |= {f"{role.name or 'actor'}.{name}.{kind}": tensor for name, tensor in gathered.items()}
    return found


def visit(bench: Bench, model: str, case: str, dtype: str, chain: str) -> dict[str, Any]:
    """Takes a job's checkpoint into this layout: what it is there, saved again, and the next step."""
    said: dict[str, Any] = {}
    name = f"{model}.{case}.{dtype}"
    every = folders(bench.out, name)
    mine = next(path for path in every if path.name.startswith(f"{name}.{chain}") and not path.exists())
    dist.barrier()
    before = every[every.index(mine) - 1] if every[0] != mine else None

    def build() -> Trainer:
        trainer = bench.build(spec_of(case, bench.sizes, dtype=dtype), bench.models(model))
        if before is not None:
            trainer.load(before)
        return trainer

    trainer = build()
    if before is None:
        said["records"] = [step(trainer, number) for number in range(1, STEPS + 1)]
    trainer.save(mine, export=True)
    files_of(trainer)
    if before is None:
        before = mine
    said["step"], said["coefficient"] = trainer.step, trainer._kl_coefficient
    if dtype == "float32":
        whole = consolidated(build())
        if dist.get_rank() == 0:
            save_file(whole, f"{mine}.safetensors")
    saved = state_of(trainer)
    again = bench.build(spec_of(case, bench.sizes, dtype=dtype), bench.models(model))
    again.load(mine)
    said |= on_every_rank({"same": state_of(again) == saved})
    if trainer._critic is not None:
        said["values"] = [value.tolist() for value in trainer.values([Sequence(**item) for item in batch_of(1)[:2]])]
    said["next"] = step(trainer, STEPS + 1)
    return {mine.name: said}


def of_an_earlier_release(bench: Bench) -> dict[str, Any]:
    """A checkpoint of one rank whose file does not say where its optimizer's states belong: what this layout takes of it."""
    now, earlier = bench.out / "llama.ppo.float32.one.0.one", bench.out / "earlier"
    if dist.get_rank() == 0 and not earlier.exists():
        earlier.mkdir()
        with safe_open(now / rank_file(0), framework="pt") as file:
            about = json.loads(file.metadata()["about"])
        about.pop("places")
        save_file(load_file(now / rank_file(0)), earlier / rank_file(0), {"about": json.dumps(about)})
    dist.barrier()
    trainer, reference = (bench.build(spec_of("ppo", bench.sizes), bench.models("llama")) for _ in range(2))
    refused = ""
    try:
        trainer.load(earlier)
    except ConfigError as error:
        refused = str(error)
    whole = not refused
    trainer.load(earlier, optimizer=whole)
    reference.load(now, optimizer=whole)
    return {"refused": refused, **on_every_rank({"equal": state_of(trainer) == state_of(reference)})}


def main(root: Path, *, everything: bool, again: bool) -> None:
    """The layouts of this set of ranks, in one set of processes; `everything`: the cases of slow tests too."""
    (root / "out").mkdir(exist_ok=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    chain = "again" if again else SETS[dist.get_world_size()]
    said: dict[str, Any] = {}
    for name in CHAINS[chain]:
        for model, case, dtype in CASES if everything else QUICK_CASES:
            said |= visit(Bench(root, SIZES[name]), model, case, dtype, chain)
        if chain in {"one", "two"}:
            said[f"earlier.{chain}.{name}"] = of_an_earlier_release(Bench(root, SIZES[name]))
        forget_groups()
    if dist.get_rank() == 0:
        file = "again" if again else f"megatron-ranks{dist.get_world_size()}"
        (root / "out" / f"{file}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), everything="everything" in sys.argv, again="again" in sys.argv)
