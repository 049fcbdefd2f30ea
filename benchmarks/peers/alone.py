"""Parts alone, each in a process of its own: `python -m benchmarks.peers.alone matmul|engine …` prints one JSON line.

matmul   float32 matrix multiplications of this machine: {"flop_per_s": …}
engine   vLLM, offline and in one process, on a job's prompts: {"samples_per_s": …, "tokens_per_s": …}
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.tasks import chat_of, tasks_of
from services.common.config.settings import Platform, load_settings
from services.common.spec.job import JobSpec
from services.gateway.admission.automatic import settle
from services.gateway.admission.limits import Machine

SIDE = 2048
"""Of the square matrices: well beyond the caches."""
LEAST_S = 3.0
MOST_SEQUENCES = 192
ENGINE_S = 8.0


def matmul() -> dict[str, float]:
    """The best rate of several seconds of products."""
    import torch

    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    torch.mm(left, right)
    seconds = []
    until = time.perf_counter() + LEAST_S
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - began)
    return {"flop_per_s": 2 * SIDE**3 / min(seconds)}


def engine(spec: JobSpec) -> dict[str, float]:
    """Rates of vLLM on as many groups as the job has in flight, given at once."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from services.rollout.engine.platform import plan_engine

    plan = plan_engine(Platform.CPU, spec, os.environ)
    os.environ.update(plan.environment)
    from vllm import LLM, SamplingParams

    samples = spec.slots * spec.rollout.group_size
    model = LLM(
        spec.model.path, dtype=spec.model.dtype.value, max_model_len=spec.model.max_model_len, max_num_seqs=min(samples, MOST_SEQUENCES),
        enforce_eager=spec.rollout.enforce_eager, enable_prefix_caching=True, **plan.arguments,
    )  # fmt: skip
    sampling = SamplingParams(
        n=spec.rollout.group_size,
        temperature=spec.rollout.temperature,
        max_tokens=spec.rollout.rollout_max_tokens,
        logprobs=0,  # of the sampled tokens, which a learner needs
        detokenize=False,
    )
    chats = [chat_of(task) for task in tasks_of(spec, spec.slots)]

    def generate(prompts: list[Any]) -> int:
        outputs = model.chat(prompts, sampling, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    generate(chats[:2])  # the first request is slow
    return _rates(lambda: generate(chats), len(chats) * spec.rollout.group_size)


def settled(job: Path) -> JobSpec:
    """The spec in a file as the gateway would accept it: its element type is the one that the stack's engine has on this machine."""
    return settle(JobSpec.model_validate_json(job.read_bytes()), load_settings(), Machine.here())


def _rates(generate: Callable[[], int], samples: int) -> dict[str, float]:
    tokens, runs, began = 0, 0, time.perf_counter()
    while (took := time.perf_counter() - began) < ENGINE_S:
        tokens, runs = tokens + generate(), runs + 1
    return {"samples_per_s": runs * samples / took, "tokens_per_s": tokens / took}


def main() -> None:
    """One part, on the cores that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["matmul", "engine"])
    parser.add_argument("--cores", type=int, nargs="+", required=True)
    parser.add_argument("--job", type=Path, help="of engine: the job's spec as JSON, with absolute paths")
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    os.environ["OMP_NUM_THREADS"] = str(len(options.cores))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.cores))
    figures = matmul() if options.part == "matmul" else engine(settled(options.job))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
