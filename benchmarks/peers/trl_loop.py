"""TRL's plain loop on one of our jobs: `GRPOTrainer` with transformers' generate, in an environment without this stack's engine.

Tasks come in the learner's order, from the sources of `services/common/data`, and the job's verifier judges. It prints a JSON line when
training begins and one for each step (the fields of `benchmarks.peers.figures.Step`).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from pydantic import TypeAdapter
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.figures import Plan, Step, informative_samples, is_measured
from benchmarks.peers.tasks import chat_of, tasks_of
from services.common.config.verifiers import choose_verifier
from services.common.data.record import TaskRecord
from services.common.spec.job import JobSpec
from services.reward.verifiers.base import Score, as_score, load


class Judge:
    """TRL's reward function: the job's verifier. It keeps the scores of the newest batch."""

    __name__ = "verifier"  # TRL names its metrics by it

    def __init__(self, tasks: list[TaskRecord], spec: JobSpec) -> None:
        self._tasks = tasks
        self._verifiers = {
            name: load(choose_verifier(name, spec.reward)) for name in {task.data_source for task in tasks}
        }
        self.scores: list[Score] = []
        self.tokens = 0

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], task: list[int], **_: object
    ) -> list[float]:
        """Rewards of the completions, chats of one message; `task`: the place of each one's task."""
        texts = [completion[0]["content"] for completion in completions]
        self.scores = [self._score(text, self._tasks[place]) for text, place in zip(texts, task, strict=True)]
        self.tokens = sum(map(len, completion_ids))
        return [score.reward for score in self.scores]

    def _score(self, text: str, task: TaskRecord) -> Score:
        details = task.extra_info | {"data_source": task.data_source}
        return as_score(self._verifiers[task.data_source](text, task.ground_truth, details))


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Prints the steps, and ends training when its time is over."""

    def __init__(self, judge: Judge, group_size: int, plan: Plan) -> None:
        self._judge, self._group_size, self._plan = judge, group_size, plan
        self._steps: list[Step] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Prints when training begins."""
        print(json.dumps({"began": time.time()}), flush=True)

    def on_step_end(self, _arguments: object, _state: object, control: Any, **_: object) -> None:  # noqa: ANN401
        """Prints the step."""
        scores = self._judge.scores
        informative = informative_samples([score.accuracy for score in scores], self._group_size)
        reward = sum(score.reward for score in scores) / len(scores)
        self._steps.append(Step(time.time(), len(scores), informative, reward, self._judge.tokens))
        print(json.dumps(asdict(self._steps[-1])), flush=True)
        control.should_training_stop = is_measured(self._steps, self._plan)


def settings_of(spec: JobSpec, out: Path, micro_batch: int, *, bf16: bool) -> Any:  # noqa: ANN401
    """TRL's configuration with the job's values. One optimizer step per batch of groups, as in the job."""
    samples = spec.algorithm.groups_per_step * spec.rollout.group_size
    learner, algorithm = spec.learner, spec.algorithm
    return GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=bf16, gradient_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, shuffle_dataset=False, seed=learner.seed,
        max_steps=learner.steps, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=samples // micro_batch,
        num_generations=spec.rollout.group_size, max_completion_length=spec.rollout.rollout_max_tokens,
        temperature=spec.rollout.temperature, loss_type=str(algorithm.loss), beta=0.0, epsilon=algorithm.clip_ratio_low,
        epsilon_high=algorithm.clip_ratio_high, learning_rate=learner.lr, lr_scheduler_type="constant_with_warmup",
        warmup_steps=learner.lr_warmup_steps, adam_beta1=learner.adam_beta1, adam_beta2=learner.adam_beta2,
        adam_epsilon=learner.adam_eps, weight_decay=learner.weight_decay, max_grad_norm=learner.clip_grad,
        model_init_kwargs={"dtype": "float32"},  # of the weights; with bf16 they are cast where they are used
    )  # fmt: skip


def main() -> None:
    """Trains until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", type=Path, required=True, help="the job's spec as JSON, with absolute paths")
    parser.add_argument("--out", type=Path, required=True, help="an empty directory")
    parser.add_argument("--plan", type=TypeAdapter(Plan).validate_json, required=True, help="how long, as JSON")
    parser.add_argument("--micro-batch", type=int, required=True, help="samples per forward and backward pass")
    parser.add_argument("--bf16", action="store_true", help="matrix multiplications in bfloat16")
    options = parser.parse_args()
    spec = JobSpec.model_validate_json(options.job.read_bytes())
    tasks = tasks_of(spec)
    judge = Judge(tasks, spec)
    rows = [{"prompt": chat_of(task), "task": place} for place, task in enumerate(tasks)]
    reporter = Reporter(judge, spec.rollout.group_size, options.plan)
    GRPOTrainer(
        model=spec.model.path, reward_funcs=judge, train_dataset=Dataset.from_list(rows), callbacks=[reporter],
        args=settings_of(spec, options.out, options.micro_batch, bf16=options.bf16),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
