"""Data, rollouts, evaluation, checkpoints and steps of verl's trainer."""

from __future__ import annotations

from services.cli.imports.conversions import job_name
from services.cli.imports.draft import Draft
from services.cli.imports.settings import Settings
from services.cli.imports.verl.defaults import ROLLOUT

ROWS = "--rows"
"""Key of the number of training rows, as the user gives it; among the defaults."""
UNDECIDED_STEPS = 100
NEARLY_GREEDY = 0.01
"""The least temperature that vLLM takes as it is."""
ASYNCHRONOUS = frozenset({"colocate_async", "separate_async"})


def name(settings: Settings, draft: Draft) -> None:
    """The job's name."""
    key = "trainer.experiment_name"
    if settings.is_given(key) and (found := job_name(settings.text(key) or "")):
        draft.set("name", found, key)


def sources(settings: Settings, draft: Draft) -> None:
    """Files of tasks."""
    for key, field in (("data.train_files", "data.train.source"), ("data.val_files", "data.eval.source")):
        files = [str(file) for file in settings.items(key)]
        if not files:
            draft.leave(key, "no file")
            continue
        merged = len(files) > 1
        remark = f"one of {len(files)} files: a source is one file, so merge them" if merged else ""
        draft.set(field, files[0], key, remark=remark, fits=not merged)
    most = "data.train_max_samples"
    size = settings.integer(most)
    if size is not None and size > 0:
        draft.set("data.train.size", size, most, remark="the first ones")
    else:
        draft.leave(most, "all rows")


def lengths(settings: Settings, draft: Draft) -> None:
    """Longest prompt and response."""
    prompt, response = "data.max_prompt_length", "data.max_response_length"
    longest = settings.integer(response) or 1
    draft.set("rollout.rollout_max_tokens", longest, response)
    remark = "max_prompt_length + max_response_length"
    draft.set("model.max_model_len", (settings.integer(prompt) or 0) + longest, prompt, response, remark=remark)


def truncation(settings: Settings, draft: Draft) -> None:
    """Prompts that are too long."""
    overlong, cut = "data.filter_overlong_prompts", "data.truncation"
    if (filters := settings.truth(overlong)) is not None:
        draft.set(overlong, filters, overlong)
    cuts = settings.text(cut) in {"left", "right", "middle"}
    draft.leave(cut, "no prompt is cut: a group whose prompt is too long fails alone", fits=not (cuts))


def evaluation(settings: Settings, draft: Draft) -> None:
    """Held-out evaluation."""
    frequency, before = "trainer.test_freq", "trainer.val_before_train"
    interval, at_start = settings.integer(frequency) or 0, bool(settings.truth(before))
    files = bool(settings.items("data.val_files"))
    enabled = files and (interval > 0 or at_start)
    draft.set(
        "eval.enabled", enabled, frequency, before, remark="at the start and at the end always" if enabled else ""
    )
    if enabled and interval > 0:
        draft.set("eval.interval_steps", interval, frequency)
    most = "data.val_max_samples"
    tasks = settings.integer(most)
    if enabled and tasks is not None and tasks > 0:
        draft.set("eval.tasks", tasks, most)
    elif enabled and not (tasks is not None and tasks > 0):
        draft.leave("data.val_files", "the first 128 of them, see eval.tasks")
    draft.leave(most, "eval.tasks is 128")
    _eval_sampling(settings, draft, enabled=enabled)


def _eval_sampling(settings: Settings, draft: Draft, *, enabled: bool) -> None:
    count, temperature, sample = (f"{ROLLOUT}.val_kwargs.{part}" for part in ("n", "temperature", "do_sample"))
    nucleus, top_k = f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.top_k"
    if not enabled:
        for key in (count, temperature, sample, nucleus, top_k):
            draft.leave(key, "there is no evaluation")
        return
    samples = settings.integer(count) or 1
    fits = samples >= 2
    draft.set("eval.samples", max(2, samples), count, remark="" if fits else "at least 2", fits=fits)
    value = settings.number(temperature) or 0.0
    if settings.truth(sample) is not False and value > 0.0:
        draft.set("eval.temperature", value, temperature, sample)
    else:
        remark = "greedy there; nearly so here"
        draft.set("eval.temperature", NEARLY_GREEDY, temperature, sample, remark=remark)
    full = settings.number(nucleus) in {None, 1.0}
    draft.leave(nucleus, "evaluation samples from the whole distribution", fits=full)
    whole = settings.integer(top_k) in {None, -1, 0}
    draft.leave(top_k, "evaluation samples from the whole distribution", fits=whole)


def steps(settings: Settings, draft: Draft) -> None:
    """Optimizer steps of the job."""
    total, epochs, batch = "trainer.total_training_steps", "trainer.total_epochs", "data.train_batch_size"
    if (count := settings.integer(total)) is not None:
        draft.set("learner.steps", count, total)
        draft.leave(epochs, "total_training_steps counts")
        return
    draft.leave(total, "not set: total_epochs counts")
    times, groups, rows = settings.integer(epochs) or 1, settings.integer(batch) or 0, settings.integer(ROWS)
    if rows is None or groups < 1:
        remark = f"to decide: {times} epochs × (rows ÷ {groups}); --rows N computes it"
        draft.set("learner.steps", UNDECIDED_STEPS, epochs, remark=remark, fits=False)
        return
    remark = f"{times} epochs × ({rows} rows ÷ {groups})"
    if settings.truth("algorithm.filter_groups.enable"):
        remark += ", at most: a step may take several batches of rows"
    draft.set("learner.steps", times * (rows // groups), epochs, remark=remark)


def checkpoints(settings: Settings, draft: Draft) -> None:
    """Checkpoints."""
    frequency, keep = "trainer.save_freq", "trainer.max_actor_ckpt_to_keep"
    interval = settings.integer(frequency) or 0
    if interval > 0:
        draft.set("checkpoint.interval_steps", interval, frequency)
    else:
        draft.leave(frequency, "recovery needs checkpoints: every checkpoint.interval_steps")
    if settings.is_given(keep):
        draft.set("checkpoint.keep_last", settings.integer(keep), keep)
    else:
        draft.leave(keep, "verl keeps all; checkpoint.keep_last is 2")


def off_policy(settings: Settings, draft: Draft) -> None:
    """How old a policy may be."""
    mode, most, stale = (
        "trainer.v1.trainer_mode",
        "trainer.v1.sampler.max_off_policy_threshold",
        "async_training.staleness_threshold",
    )
    threshold = settings.integer(most)
    if settings.is_given(stale):
        value = settings.number(stale) or 0.0
        remark = "a share of stale samples there, steps here"
        draft.set("off_policy.max_off_policy_steps", 1 if value > 0.0 else 0, stale, remark=remark, fits=False)
        draft.leave(mode, "async_training.staleness_threshold counts")
    elif settings.text(mode) in ASYNCHRONOUS and threshold is not None:
        remark = f"verl's threshold {threshold} counts the step itself"
        draft.set("off_policy.max_off_policy_steps", max(0, threshold - 1), mode, most, remark=remark)
    else:
        remark = "verl samples with the newest policy; 2 lets servers sample while the learner trains"
        draft.set("off_policy.max_off_policy_steps", 0, mode, remark=remark)
    draft.leave(most, "the trainer is synchronous")
