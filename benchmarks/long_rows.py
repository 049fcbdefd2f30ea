"""Peak memory of a rank by the length of a response: one optimizer step, with and without context parallelism and recomputation.

    python -m benchmarks.long_rows [--tokens 8192 16384 32768] [--ranks 1 2] [--recompute none full]

The peak is what torch's allocator has given out at once within the step, beyond the weights, gradients and moments that were there before
it; the largest of the ranks. The model has random weights and the sizes below.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 1024,
}  # fmt: skip
PROMPT = 256
MIB = 1 << 20


def make_model(folder: Path) -> None:
    """A Hugging Face directory with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, max_position_embeddings=65_536, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(folder: Path, tokens: int, recompute: str) -> None:
    """One of the ranks: prints, on the first, the largest peak of all, and the seconds of the step."""
    import torch

    from services.common.config.settings import Platform
    from services.common.models.roles import RoleModels
    from services.common.spec.job import JobSpec
    from services.learner.groups.sequence import Sequence
    from services.learner.ranks.loop import build_trainer
    from services.learner.training.collectives import gather_json

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    learner = {"context_parallel_size": ranks, "max_tokens_per_micro_batch": 2 * tokens, "recompute": recompute}
    spec = JobSpec.model_validate(
        {
            "model": {"path": "tiny", "dtype": "float32"},
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "learner": learner,
        }
    )
    trainer = build_trainer(spec, RoleModels(folder), Platform.CPU)
    numbers = np.random.default_rng(0).integers(0, SIZES["vocab_size"], tokens).astype(np.int32)
    ones = np.ones(tokens - PROMPT, np.float32)

    def step(length: int) -> None:
        figures = ones[: length - PROMPT]
        trainer.train([Sequence(numbers[:length], PROMPT, -7 * figures, figures, figures > 0, 0)])

    step(2 * PROMPT)  # the optimizer makes its moments in its first step
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(tokens)
    seconds = time.perf_counter() - started
    events: Any = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    peaks = gather_json(int(np.cumsum(sizes).max()), trainer.device)
    if trainer.layout.rank == 0:
        print(json.dumps({"peak": max(peaks), "seconds": seconds}), flush=True)


def figures_of(folder: str, tokens: int, ranks: int, recompute: str) -> dict[str, float]:
    """Peak bytes and seconds of one measurement. Raises CalledProcessError when it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "benchmarks.long_rows"]
    arguments = ["--folder", folder, "--tokens", str(tokens), "--recompute", recompute]
    done = subprocess.run(
        [sys.executable, *launch, *arguments], env=environment, check=True, capture_output=True, text=True
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(line)
    return found


def main() -> None:
    """Prints a row for each measurement, or is one of the measured ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16_384, 32_768], help="of the one sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="that share it")
    parser.add_argument("--recompute", nargs="+", default=["none", "full"], help="learner.recompute")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        measure(arguments.folder, arguments.tokens[0], arguments.recompute[0])
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for tokens in arguments.tokens:
            for recompute in arguments.recompute:
                for ranks in arguments.ranks:
                    found = figures_of(folder, tokens, ranks, recompute)
                    print(
                        f"{tokens:6} tokens, {ranks} ranks, recompute {recompute:9} {found['peak'] / MIB:7.0f} MiB a rank "
                        f"{found['seconds']:7.1f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
