"""Parts alone, each in a process of its own: `python -m benchmarks.peers.alone matmul|engine|episodes …` prints one JSON line.

matmul     float32 matrix multiplications of this machine: {"flop_per_s": …}
engine     vLLM, offline and in one process, on a job's prompts: {"samples_per_s": …, "tokens_per_s": …}
episodes   a plain loop over vLLM and a job's environments, all in one process: the same
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.tasks import chat_of, tasks_of
from services.common.config.settings import Platform, load_settings
from services.common.data.environments import environment_call
from services.common.spec.environment import EnvironmentSpec
from services.common.spec.job import JobSpec
from services.common.streams.types import EnvironmentCall
from services.environment.base import Observation
from services.environment.registry import make
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
    model = _offline(spec)
    sampling = _sampling(spec, spec.rollout.rollout_max_tokens, n=spec.rollout.group_size, detokenize=False)
    chats = [chat_of(task) for task in tasks_of(spec, spec.slots)]

    def generate(prompts: list[Any]) -> int:
        outputs = model.chat(prompts, sampling, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    generate(chats[:2])  # the first request is slow
    return _rates(lambda: generate(chats), len(chats) * spec.rollout.group_size)


def episodes(spec: JobSpec) -> dict[str, float]:
    """Rates of rounds, as many groups as the job has in flight at once: all episodes that go on sample a turn, then all are answered."""
    limits = spec.environment or EnvironmentSpec()
    model, sampling = _offline(spec), _sampling(spec, limits.max_turn_tokens)
    calls = [environment_call(task, limits) for task in tasks_of(spec, spec.slots)]
    played = [call for call in calls if call is not None for _ in range(spec.rollout.group_size)]

    def play(calls: list[EnvironmentCall]) -> int:
        going, tokens = [_Episode(call) for call in calls], 0
        for _ in range(limits.max_turns):
            outputs = model.chat([episode.chat for episode in going], sampling, use_tqdm=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            pairs = zip(going, outputs, strict=True)
            going = [episode for episode, output in pairs if episode.goes_on(output.outputs[0].text)]
            if not going:
                break
        return tokens

    play(played[:2])  # the first request is slow
    return _rates(lambda: play(played), len(played))


class _Episode:
    """One chat with an environment."""

    def __init__(self, call: EnvironmentCall) -> None:
        random.seed(call.seed)
        self._world = make(call.name, call.config)
        self.chat: list[dict[str, str]] = []
        self._hear(self._world.reset(call.seed, {}))

    def goes_on(self, reply: str) -> bool:
        """Whether another turn follows the policy's reply."""
        self.chat.append({"role": "assistant", "content": reply})
        return self._hear(self._world.step(reply))

    def _hear(self, observation: Observation) -> bool:
        self.chat += [{"role": message.role, "content": message.content} for message in observation.messages]
        return not observation.done


def _offline(spec: JobSpec) -> Any:  # noqa: ANN401  vLLM's
    """An engine of vLLM in this process, with the job's settings."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from services.rollout.engine.platform import plan_engine

    plan = plan_engine(Platform.CPU, spec, os.environ)
    os.environ.update(plan.environment)
    from vllm import LLM

    samples = spec.slots * spec.rollout.group_size
    return LLM(
        spec.model.path, dtype=spec.model.dtype.value, max_model_len=spec.model.max_model_len, max_num_seqs=min(samples, MOST_SEQUENCES),
        enforce_eager=spec.rollout.enforce_eager, enable_prefix_caching=True, **plan.arguments,
    )  # fmt: skip


def _sampling(spec: JobSpec, max_tokens: int, **more: Any) -> Any:  # noqa: ANN401
    from vllm import SamplingParams

    # Log-probs: of the sampled tokens, which a learner needs.
    return SamplingParams(temperature=spec.rollout.temperature, max_tokens=max_tokens, logprobs=0, **more)


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
    parser.add_argument("part", choices=["matmul", "engine", "episodes"])
    parser.add_argument("--cores", type=int, nargs="+", required=True)
    parser.add_argument("--job", type=Path, help="of engine and episodes: the job's spec as JSON, with absolute paths")
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    os.environ["OMP_NUM_THREADS"] = str(len(options.cores))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.cores))
    parts = {"engine": engine, "episodes": episodes}
    figures = matmul() if options.part == "matmul" else parts[options.part](settled(options.job))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
