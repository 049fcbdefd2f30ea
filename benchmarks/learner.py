"""The learner alone: optimizer steps of its back ends, against plain transformers on the same batch, in the same run.

    python benchmarks/learner.py [--shape smollm2] [--threads 1] [--rounds 3] [--ways plain shared]
    python benchmarks/learner.py --platform cuda [--shape qwen2.5-0.5b] [--profile]

    plain            padded rows, logits of responses only, torch's AdamW
    rows, shared     Megatron, prompts computed for each response or once
    fsdp2, adapters  the same with shared prompts on FSDP2; low-rank adapters of rank 8 in place of the weights

On a CPU, in float32, each round runs all of them one after the other. On CUDA, in bfloat16 with AdamW on float32 weights, each has the
device for itself, and its operations are compared with those of a bfloat16 product of 8192 × 8192, measured by the same process.
The models have random weights of the shape's sizes. A version is the file of weights that is published after a step: gathered, with
adapters merged, and written.
"""

from __future__ import annotations

import argparse
import importlib
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
BEGIN, STEP, VERSION, PEAK, PRODUCT, PROFILE = "begin", "step", "version", "peak", "product", "profile"
CPU, CUDA = "cpu", "cuda"
DTYPES = {CPU: "float32", CUDA: "bfloat16"}
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
    "qwen2.5-0.5b": Shape(
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "vocab_size": 151_936},
        groups=8, group_size=8, prompt=(512, 1024), response=(512, 2048), max_tokens=16_384,
    ),
}  # fmt: skip
OF = {CPU: ("demo", "smollm2", "gsm8k"), CUDA: ("qwen2.5-0.5b",)}
"""Platform → the shapes that are measured unless one is named."""


def operations(shape: Shape, way: str) -> float:
    """Of a step's products: forward, and twice as many backward, of which weights that are not trained need half."""
    config, batch = shape.config, batch_of(shape)
    hidden, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    attention = 2 * hidden * (hidden + config["num_key_value_heads"] * size)
    layer = attention + 3 * hidden * config["intermediate_size"]
    prompts = {item["group_id"]: item["prompt_len"] for item in batch}
    responses = [len(item["advantage"]) for item in batch]
    shares = way not in {PLAIN, "rows"}
    before = list(prompts.values()) if shares else [item["prompt_len"] for item in batch]
    pairs = sum(n * n / 2 for n in before) + sum(
        item["prompt_len"] * n + n * n / 2 for item, n in zip(batch, responses, strict=True)
    )
    products = layer * (sum(before) + sum(responses)) * config["num_hidden_layers"]
    products += hidden * config["vocab_size"] * sum(responses)
    weights, scores = 2 * products, 4 * hidden * pairs * config["num_hidden_layers"]
    return float((2 if way == "adapters" else 3) * weights + 3 * scores)


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


def make_model(folder: Path, shape: Shape, platform: str) -> None:
    """A Hugging Face directory with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape.config, max_position_embeddings=4096, tie_word_embeddings=True)
    with torch.device(platform):
        LlamaForCausalLM(config).to(getattr(torch, DTYPES[platform])).save_pretrained(folder)


def plain_step(folder: Path, shape: Shape, platform: str) -> Callable[[], object]:
    """One step of a plain loop over transformers. Rows are padded on the right: a causal mask keeps padding out."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, DTYPES[platform])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(platform)
    weights = list(model.parameters())
    masters = weights if dtype is torch.float32 else [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=platform == CUDA)
    batch = sorted(batch_of(shape), key=lambda item: -len(item["tokens"]))
    total = sum(len(item["advantage"]) for item in batch)
    chunks: list[list[dict[str, Any]]] = []
    for item in batch:
        if not chunks or (len(chunks[-1]) + 1) * len(chunks[-1][0]["tokens"]) > shape.max_tokens:
            chunks.append([])
        chunks[-1].append(item)

    def column(chunk: list[dict[str, Any]], name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([item[name] for item in chunk])).to(platform)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for chunk in chunks:
            tokens = torch.zeros(len(chunk), len(chunk[0]["tokens"]) - 1, dtype=torch.int64)
            for row, item in enumerate(chunk):
                tokens[row, : len(item["tokens"]) - 1] = torch.from_numpy(item["tokens"][:-1])
            hidden = model.model(input_ids=tokens.to(platform)).last_hidden_state
            places = [np.arange(item["prompt_len"] - 1, len(item["tokens"]) - 1) for item in chunk]
            rows = np.repeat(np.arange(len(chunk)), [len(place) for place in places])
            chosen = hidden[torch.from_numpy(rows).to(platform), torch.from_numpy(np.concatenate(places)).to(platform)]
            targets = np.concatenate([item["tokens"][item["prompt_len"] :] for item in chunk])
            logprobs = torch.log_softmax(model.lm_head(chosen).float(), -1)
            logprobs = logprobs.gather(-1, torch.from_numpy(targets).long().to(platform)[:, None])[:, 0]
            ratio, advantage = (logprobs - column(chunk, "inference_logprobs")).exp(), column(chunk, "advantage")
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
        if masters is not weights:
            for master, weight in zip(masters, weights, strict=True):
                master.grad = weight.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if masters is not weights:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)

    return step


def trainer_actions(folder: Path, shape: Shape, way: str, platform: str) -> dict[str, Callable[[], object]]:
    """One step of the learner's trainer, and what it writes for a version."""
    from services.common.config.settings import Platform
    from services.common.models.roles import RoleModels
    from services.common.spec.job import JobSpec
    from services.learner.groups.sequence import Sequence
    from services.learner.ranks.loop import build_trainer
    from services.learner.training.tensor_file import write_version

    spec = JobSpec.model_validate(
        {
            "model": {"path": "tiny", "dtype": DTYPES[platform]} | SETTINGS[way].get("model", {}),
            "data": {"train": {"source": "reasoning_gym:chain_sum"}},
            "learner": {"max_tokens_per_micro_batch": shape.max_tokens} | SETTINGS[way].get("learner", {}),
        }
    )
    trainer = build_trainer(spec, RoleModels(folder), Platform(platform))
    batch = [Sequence(**item) for item in batch_of(shape)]
    version = folder / f"{way}.version"

    def publish() -> None:
        version.unlink(missing_ok=True)
        write_version(version, 1, 1, trainer.export(copy=False) or {})

    return {STEP: lambda: trainer.train(batch), VERSION: publish}


def serve(way: str, folder: Path, shape: Shape, platform: str) -> None:
    """Does what each line of standard input names, and answers with a number: seconds, or what is asked for."""
    import torch

    importlib.import_module("transformers" if way == PLAIN else "services.learner.ranks.loop")
    sys.stdin.readline()  # until its turn it takes nothing of the device
    if way == PLAIN:
        actions: dict[str, Callable[[], object]] = {STEP: plain_step(folder, shape, platform)}
    else:
        actions = trainer_actions(folder, shape, way, platform)
    for action in actions.values():
        action()
    if platform == CUDA:
        actions[STEP]()  # the first has loaded kernels
    figures = {PEAK: lambda: peak_bytes(platform), PRODUCT: product_s, PROFILE: lambda: profile(way, actions[STEP])}
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name in figures:
            print(json.dumps(figures[name]()), flush=True)  # type: ignore[no-untyped-call]
            continue
        started = time.perf_counter()
        actions[name]()
        if platform == CUDA:
            torch.cuda.synchronize()
        print(json.dumps(time.perf_counter() - started), flush=True)


def peak_bytes(platform: str) -> int:
    """The most memory that was held: of the process, or on the device."""
    if platform == CUDA:
        import torch

        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


SIDE = 8192


def product_s() -> float:
    """The median time of a product of two random bfloat16 matrices on the device."""
    import torch

    a, b = torch.randn(2, SIDE, SIDE, device=CUDA, dtype=torch.bfloat16)
    times: list[float] = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times[5:])


def profile(way: str, step: Callable[[], object]) -> float:
    """Prints what a step's time on the device goes to; gives the share of the step in which the device computes."""
    import torch
    from torch.profiler import ProfilerActivity

    started = time.perf_counter()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
    averages = recorded.key_averages()
    kernels = [event for event in averages if event.device_type.name == "CUDA"]
    print(
        way, averages.table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70), file=sys.stderr
    )
    return float(sum(event.self_device_time_total for event in kernels)) / 1e6 / took


@dataclass(slots=True)
class Measured:
    """Steps of one way."""

    seconds: list[float]
    version_s: list[float]
    """Empty of the plain way."""
    peak_bytes: int = 0
    product_s: float = 0.0
    """On CUDA."""
    busy: float = 0.0
    """Share of a profiled step in which the device computes; 0 where none was profiled."""


def timings(
    name: str, threads: int, rounds: int, ways: Sequence[str] = WAYS, platform: str = CPU, *, profiled: bool = False
) -> dict[str, Measured]:
    """The steps of each way. Raises SystemExit when a measured process has died."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--shape", name, "--platform", platform, "--folder", folder]
        subprocess.run([*command, "--way", "make"], check=True, env=environment)
        started = {
            way: subprocess.Popen(
                [*command, "--way", way], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for way in ways
        }
        try:
            for together in [ways] if platform == CPU else [[way] for way in ways]:
                running = {way: started[way] for way in together}
                found |= _measured(running, rounds, platform, profiled=profiled)
                for process in running.values():
                    process.kill()
                    process.wait()
        finally:
            for process in started.values():
                process.kill()
                process.wait()
    return found


def _measured(
    running: dict[str, subprocess.Popen[str]], rounds: int, platform: str, *, profiled: bool
) -> dict[str, Measured]:
    found = {way: Measured([], []) for way in running}
    for process in running.values():
        _ask(process, BEGIN)
    for process in running.values():
        while (line := _answer(process)) != "ready":
            print(line)
    for _ in range(rounds):
        for way, process in running.items():
            found[way].seconds.append(float(_answer(process, STEP)))
            if way != PLAIN:
                found[way].version_s.append(float(_answer(process, VERSION)))
    for way, process in running.items():
        found[way].peak_bytes = int(_answer(process, PEAK))
        if platform == CUDA:
            found[way].product_s = float(_answer(process, PRODUCT))
        if profiled:
            found[way].busy = float(_answer(process, PROFILE))
    return found


def measure(
    name: str, threads: int, rounds: int, ways: Sequence[str], platform: str = CPU, *, profiled: bool = False
) -> None:
    """Prints the figures of one shape: medians over the rounds; ratios to the first of the ways."""
    shape, took = SHAPES[name], timings(name, threads, rounds, ways, platform, profiled=profiled)
    samples = shape.groups * shape.group_size
    tokens = sum(len(item["advantage"]) for item in batch_of(shape))
    first = statistics.median(took[ways[0]].seconds)
    print(
        f"{name}: {shape.groups} groups of {shape.group_size}, {tokens} response tokens, {threads} threads, {rounds} rounds"
    )
    for way, found in took.items():
        seconds, median = found.seconds, statistics.median(found.seconds)
        print(
            f"  {way:8} {median * 1000:8.0f} ms a step ({min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f})  "
            f"{samples / median:8.1f} samples/s  {first / median:5.2f} × {ways[0]}  {found.peak_bytes / 2**20:6.0f} MiB at most"
            + (f"  version {statistics.median(found.version_s) * 1000:6.0f} ms" if found.version_s else "")
        )
        if platform == CUDA:
            share = operations(shape, way) / median / (2 * SIDE**3 / found.product_s)
            print(
                f"           {tokens / median:8.0f} response tokens/s  {operations(shape, way) / median / 1e12:5.0f} TFLOP/s, "
                f"{share:.2f} of a product's {2 * SIDE**3 / found.product_s / 1e12:.0f}"
                + (f"  the device computes {found.busy:.2f} of a profiled step" if found.busy else "")
            )


def _ask(process: subprocess.Popen[str], question: str) -> None:
    if process.stdin is None:
        raise ValueError("a measured process is asked through a pipe")
    process.stdin.write(question + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str], question: str | None = None) -> str:
    if process.stdout is None:
        raise ValueError("a measured process answers through a pipe")
    if question is not None:
        _ask(process, question)
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a measured process has died")
    return line.strip()


def main() -> None:
    """Measures, or is one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=OF, default=CPU)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="which; by default all of the platform")
    parser.add_argument("--threads", type=int, default=1, help="computing threads of each")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each; the medians are printed")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="which; all by default, all in memory at the same time"
    )
    parser.add_argument("--profile", action="store_true", help="CUDA: also print what a step's time goes to")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on, shapes = arguments.platform, arguments.shape or list(OF[arguments.platform])
    if arguments.way == "make":
        make_model(arguments.folder, SHAPES[shapes[0]], on)
    elif arguments.way:
        serve(arguments.way, arguments.folder, SHAPES[shapes[0]], on)
    else:
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        for name in shapes:
            measure(name, arguments.threads, arguments.rounds, arguments.ways, on, profiled=arguments.profile)


if __name__ == "__main__":
    main()
