"""The learner alone: optimizer steps of its back ends, against plain transformers on the same batch, in the same run.

    python benchmarks/learner.py [--shape smollm2] [--threads 1] [--rounds 3] [--ways plain shared]

    plain            padded rows, logits of responses only, torch's AdamW
    rows, shared     Megatron, prompts computed for each response or once
    fsdp2, adapters  the same with shared prompts on FSDP2; low-rank adapters of rank 8 in place of the weights

Each round runs all of them one after the other; the models have random weights of the shape's sizes. A version is the file of weights
that is published after a step: gathered, with adapters merged, and written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PLAIN, SHARED = "plain", "shared"
STEP, VERSION = "step", "version"
SETTINGS: dict[str, dict[str, Any]] = {
    "rows": {"learner": {"shared_prompts": False}},
    SHARED: {},
    "fsdp2": {"learner": {"backend": "fsdp2"}},
    "adapters": {"learner": {"backend": "fsdp2"}, "model": {"lora": {"rank": 8}}},
}
"""Way of the learner → what it changes of a job."""
WAYS = (PLAIN, *SETTINGS)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model and of a step."""

    config: dict[str, Any]
    groups: int
    group_size: int
    prompt: tuple[int, int]
    """Shortest and longest, tokens."""
    response: tuple[int, int]
    max_tokens: int


SHAPES = {
    "demo": Shape(
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 272},
        groups=64, group_size=8, prompt=(14, 14), response=(3, 5), max_tokens=16_384,
    ),
    "smollm2": Shape(
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49_152},
        groups=6, group_size=8, prompt=(38, 42), response=(2, 16), max_tokens=2048,
    ),
    "gsm8k": Shape(
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49_152},
        groups=2, group_size=8, prompt=(60, 140), response=(40, 96), max_tokens=2048,
    ),
}  # fmt: skip


def batch_of(shape: Shape) -> list[dict[str, Any]]:
    """A step's sequences, as fields of `Sequence`."""
    rng = np.random.default_rng(0)
    batch = []
    for group in range(shape.groups):
        prompt = rng.integers(0, shape.config["vocab_size"], rng.integers(*shape.prompt, endpoint=True))
        for _ in range(shape.group_size):
            response = rng.integers(0, shape.config["vocab_size"], rng.integers(*shape.response, endpoint=True))
            ones = np.ones(len(response), np.float32)
            batch.append(
                {
                    "tokens": np.concatenate([prompt, response]).astype(np.int32),
                    "prompt_len": len(prompt),
                    "inference_logprobs": -np.log(shape.config["vocab_size"]) * ones,
                    "advantage": float(rng.normal()) * ones,
                    "loss_mask": ones.astype(bool),
                    "group_id": group,
                }
            )
    return batch


def make_model(folder: Path, shape: Shape) -> None:
    """A Hugging Face directory with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape.config, max_position_embeddings=2048, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def plain_step(folder: Path, shape: Shape) -> Callable[[], object]:
    """One step of a plain loop over transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    batch = sorted(batch_of(shape), key=lambda item: -len(item["tokens"]))
    total = sum(len(item["advantage"]) for item in batch)
    chunks: list[list[dict[str, Any]]] = []
    for item in batch:
        if not chunks or (len(chunks[-1]) + 1) * len(chunks[-1][0]["tokens"]) > shape.max_tokens:
            chunks.append([])
        chunks[-1].append(item)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for chunk in chunks:
            width = len(chunk[0]["tokens"]) - 1
            tokens = torch.zeros(len(chunk), width, dtype=torch.int64)
            mask = torch.zeros_like(tokens)
            for row, item in enumerate(chunk):
                kept = torch.from_numpy(item["tokens"][:-1]).long()
                tokens[row, : len(kept)], mask[row, : len(kept)] = kept, 1
            hidden = model.model(input_ids=tokens, attention_mask=mask).last_hidden_state
            places = [np.arange(item["prompt_len"] - 1, len(item["tokens"]) - 1) for item in chunk]
            rows = torch.from_numpy(np.repeat(np.arange(len(chunk)), [len(place) for place in places]))
            logits = model.lm_head(hidden[rows, torch.from_numpy(np.concatenate(places))])
            targets = torch.from_numpy(np.concatenate([item["tokens"][item["prompt_len"] :] for item in chunk])).long()
            logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
            advantage = torch.from_numpy(np.concatenate([item["advantage"] for item in chunk]))
            old = torch.from_numpy(np.concatenate([item["inference_logprobs"] for item in chunk]))
            ratio = (logprobs - old).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def trainer_actions(folder: Path, shape: Shape, way: str) -> dict[str, Callable[[], object]]:
    """One step of the learner's trainer, and what it writes for a version."""
    from services.common.config.settings import Platform
    from services.common.models.roles import RoleModels
    from services.common.spec.job import JobSpec
    from services.learner.groups.sequence import Sequence
    from services.learner.ranks.loop import build_trainer
    from services.learner.training.tensor_file import write_version

    spec = JobSpec.model_validate(
        {
            "model": {"path": "tiny", "dtype": "float32"} | SETTINGS[way].get("model", {}),
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "learner": {"max_tokens_per_micro_batch": shape.max_tokens} | SETTINGS[way].get("learner", {}),
        }
    )
    trainer = build_trainer(spec, RoleModels(folder), Platform.CPU)
    batch = [Sequence(**item) for item in batch_of(shape)]
    version = folder / f"{way}.version"

    def publish() -> None:
        version.unlink(missing_ok=True)
        write_version(version, 1, 1, trainer.export(copy=False) or {})

    return {STEP: lambda: trainer.train(batch), VERSION: publish}


def serve(way: str, folder: Path, shape: Shape) -> None:
    """Does what each line of standard input names, and answers with its seconds."""
    actions = {STEP: plain_step(folder, shape)} if way == PLAIN else trainer_actions(folder, shape, way)
    for action in actions.values():
        action()
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        actions[line.strip()]()
        print(json.dumps(time.perf_counter() - started), flush=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one way."""

    seconds: list[float]
    version_s: list[float]
    """Empty of the plain way."""
    peak_bytes: int
    """Of the process's memory."""


def timings(name: str, threads: int, rounds: int, ways: Sequence[str] = WAYS) -> dict[str, Measured]:
    """The steps of each way. Raises SystemExit when a measured process has died."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--shape", name, "--folder", folder]
        subprocess.run([*command, "--way", "make"], check=True, env=environment)
        running = {
            way: subprocess.Popen(
                [*command, "--way", way], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for way in ways
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        written: dict[str, list[float]] = {way: [] for way in ways}
        try:
            for process in running.values():
                while (line := _answer(process)) != "ready":
                    print(line)
            for _ in range(rounds):
                for way, process in running.items():
                    took[way].append(float(_answer(process, f"{STEP}\n")))
                    if way != PLAIN:
                        written[way].append(float(_answer(process, f"{VERSION}\n")))
            peaks = {way: _peak_bytes(process.pid) for way, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return {way: Measured(seconds, written[way], peaks[way]) for way, seconds in took.items()}


def measure(name: str, threads: int, rounds: int, ways: Sequence[str]) -> None:
    """Prints the figures of one shape: medians over the rounds; ratios to the first of the ways."""
    shape, took = SHAPES[name], timings(name, threads, rounds, ways)
    samples = shape.groups * shape.group_size
    first = statistics.median(took[ways[0]].seconds)
    print(f"{name}: {shape.groups} groups of {shape.group_size}, {threads} threads, {rounds} rounds")
    for way, found in took.items():
        seconds, median = found.seconds, statistics.median(found.seconds)
        print(
            f"  {way:8} {median * 1000:8.0f} ms a step ({min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f})  "
            f"{samples / median:8.1f} samples/s  {first / median:5.2f} × {ways[0]}  {found.peak_bytes / 2**20:6.0f} MiB at most"
            + (f"  version {statistics.median(found.version_s) * 1000:6.0f} ms" if found.version_s else "")
        )


def _peak_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _answer(process: subprocess.Popen[str], question: str = "") -> str:
    if process.stdin is None or process.stdout is None:
        raise ValueError("a measured process talks through pipes")
    process.stdin.write(question)
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a measured process has died")
    return line.strip()


def main() -> None:
    """Measures, or is one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="which; all by default")
    parser.add_argument("--threads", type=int, default=1, help="computing threads of each")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each; the medians are printed")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="which; all by default, all in memory at the same time"
    )
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = arguments.shape or list(SHAPES)
    if arguments.way == "make":
        make_model(arguments.folder, SHAPES[shapes[0]])
    elif arguments.way:
        serve(arguments.way, arguments.folder, SHAPES[shapes[0]])
    else:
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        for name in shapes:
            measure(name, arguments.threads, arguments.rounds, arguments.ways)


if __name__ == "__main__":
    main()
