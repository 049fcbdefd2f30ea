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
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.figures import Step, informative_samples
from services.common.config.settings import Settings
from services.common.config.verifiers import choose_verifier
from services.common.data.bounds import DataBounds
from services.common.data.order import task_index
from services.common.data.record import TaskRecord
from services.common.data.source import open_within
from services.common.spec.job import JobSpec
from services.reward.verifiers.base import Score, load

MOST_TASKS = 10_000
"""Training begins again with the first one after so many."""


class Judge:
    """TRL's reward function: the job's verifier. It keeps the scores of the newest batch."""

    __name__ = "verifier"  # TRL names its metrics by it

    def __init__(self, tasks: list[TaskRecord], spec: JobSpec) -> None:
        self._tasks = tasks
        self._verifiers = {
            name: load(choose_verifier(name, spec.reward.verifiers)) for name in {task.data_source for task in tasks}
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
        return self._verifiers[task.data_source](text, task.ground_truth, details)


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Prints the steps, and ends training when its time is over."""

    def __init__(self, judge: Judge, group_size: int, warm_up: int, least: int, seconds: float) -> None:
        self._judge, self._group_size = judge, group_size
        self._warm_up, self._least, self._seconds = warm_up, least, seconds
        self._step, self._measured_from = 0, 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Prints when training begins."""
        print(json.dumps({"began": time.time()}), flush=True)

    def on_step_end(self, _arguments: object, _state: object, control: Any, **_: object) -> None:  # noqa: ANN401
        """Prints the step."""
        now, scores = time.time(), self._judge.scores
        informative = informative_samples([score.accuracy for score in scores], self._group_size)
        reward = sum(score.reward for score in scores) / len(scores)
        print(json.dumps(asdict(Step(now, len(scores), informative, reward, self._judge.tokens))), flush=True)
        self._step += 1
        if self._step == self._warm_up:
            self._measured_from = now
        if self._step >= self._warm_up + self._least and now - self._measured_from >= self._seconds:
            control.should_training_stop = True


def tasks_of(spec: JobSpec) -> list[TaskRecord]:
    """The job's training tasks, in the order in which the learner issues them."""
    train = spec.data.train
    bounds = DataBounds.of(Settings())
    source = open_within(train, [Path(train.source).parent], bounds, field="data.train")
    size = len(source)
    places = (task_index(spec.data.seed, n, size, spec.data.shuffle) for n in range(min(size, MOST_TASKS)))
    return [source[place] for place in places]


def settings_of(spec: JobSpec, out: Path, micro_batch: int, *, bf16: bool) -> Any:  # noqa: ANN401
    """TRL's configuration with the job's values. One optimizer step per batch of groups, as in the job."""
    samples = spec.algorithm.groups_per_step * spec.rollout.group_size
    learner, algorithm = spec.learner, spec.algorithm
    return GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=bf16, gradient_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, shuffle_dataset=False, seed=learner.seed,
        max_steps=learner.steps, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=samples // micro_batch,
        num_generations=spec.rollout.group_size, max_completion_length=spec.rollout.rollout_max_tokens,
        temperature=spec.rollout.temperature, loss_type=algorithm.loss.value, beta=0.0, epsilon=algorithm.clip_ratio_low,
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
    parser.add_argument("--warm-up", type=int, required=True, help="steps before those that are measured")
    parser.add_argument("--least", type=int, required=True, help="fewest measured steps")
    parser.add_argument("--seconds", type=float, required=True, help="of the measured steps")
    parser.add_argument("--micro-batch", type=int, required=True, help="samples per forward and backward pass")
    parser.add_argument("--bf16", action="store_true", help="matrix multiplications in bfloat16")
    options = parser.parse_args()
    spec = JobSpec.model_validate_json(options.job.read_bytes())
    tasks = tasks_of(spec)
    judge = Judge(tasks, spec)
    rows = [
        {"prompt": [{"role": message.role, "content": message.content} for message in task.prompt], "task": place}
        for place, task in enumerate(tasks)
    ]
    reporter = Reporter(judge, spec.rollout.group_size, options.warm_up, options.least, options.seconds)
    GRPOTrainer(
        model=spec.model.path, reward_funcs=judge, train_dataset=Dataset.from_list(rows), callbacks=[reporter],
        args=settings_of(spec, options.out, options.micro_batch, bf16=options.bf16),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
