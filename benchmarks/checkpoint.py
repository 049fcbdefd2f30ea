"""How long a checkpoint holds the training: the copy, against writing the same state before the next step, in the same run.

    python benchmarks/checkpoint.py [--repeats 5] [--hidden 512]

One rank with the real trainer; float32 Llama of 8 layers, so weights and Adam's moments take 12 bytes a parameter.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from services.learner.training.trainer import Trainer

MIB = 1 << 20
VOCABULARY = 8192


def make_model(folder: Path, hidden: int) -> None:
    """Random weights, and a tokenizer file that nobody reads. In a process of its own: Megatron's adaptor and this do not mix."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def make_trainer(model: Path) -> Trainer:
    """One rank on the CPU."""
    import torch

    from services.common.config.settings import Platform
    from services.common.spec.job import JobSpec
    from services.learner.algorithms.losses import LossInputs
    from services.learner.backends import open_backend
    from services.learner.training.trainer import Trainer

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -inputs.advantages * (inputs.trainer_logprobs - inputs.old_logprobs).exp(), {}

    spec = JobSpec.model_validate(
        {
            "model": {"path": "tiny", "dtype": "float32"},
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "learner": {"max_tokens_per_micro_batch": 512},
        }
    )
    return Trainer(model, spec, open_backend(spec, Platform.CPU), loss)


def step(trainer: Trainer) -> None:
    """One optimizer step on eight sequences of 64 tokens."""
    from services.learner.groups.sequence import Sequence

    rng = np.random.default_rng(trainer.step)
    ones = np.ones(48, np.float32)
    batch = [
        Sequence(rng.integers(0, VOCABULARY, 64).astype(np.int32), 16, -9 * ones, ones, ones.astype(bool), number)
        for number in range(8)
    ]
    trainer.train(batch)


def seconds(action: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def report(trainer: Trainer, folder: Path, repeats: int) -> None:
    """Prints the figures: medians."""
    held, synchronously, alone, beside, memcpy = [], [], [], [], []
    size = 0
    for number in range(repeats + 1):
        target = folder / str(number)
        alone.append(seconds(lambda: step(trainer)))
        held.append(seconds(lambda target=target: trainer.save(target)))  # type: ignore[misc]
        beside.append(seconds(lambda: step(trainer)))
        trainer.saved(wait=True)
        again = folder / f"{number}-synchronous"
        copied = seconds(lambda again=again: trainer.save(again))  # type: ignore[misc]
        synchronously.append(copied + seconds(lambda: trainer.saved(wait=True)))
        (file,) = target.iterdir()
        size = file.stat().st_size
        block = np.ones(size, np.uint8)
        memcpy.append(seconds(block.copy))
        del block
        for path in (target, again):
            shutil.rmtree(path)
    # the first round pays for what every later one finds warm
    hold, write, copy = (statistics.median(values[1:]) for values in (held, synchronously, memcpy))
    print(f"state of the rank                          {size / MIB:8.0f} MiB")
    print(
        f"training held for the copy                 {hold * 1000:8.0f} ms   ({hold / copy:.2f} × a plain copy into new memory)"
    )
    print(f"held if it waited for write, hash, fsync   {write * 1000:8.0f} ms")
    print(f"held / synchronous                         {hold / write:8.2f}")
    plain, busy = statistics.median(alone[1:]), statistics.median(beside[1:])
    print(f"step alone / while the thread writes       {plain * 1000:8.0f} ms / {busy * 1000:.0f} ms")


def main() -> None:
    """Makes the model and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the medians are printed")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_model(arguments.make, arguments.hidden)
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as home:
        model = Path(home) / "model"
        command = [sys.executable, __file__, "--make", str(model), "--hidden", str(arguments.hidden)]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        report(make_trainer(model), Path(home), arguments.repeats)


if __name__ == "__main__":
    main()
