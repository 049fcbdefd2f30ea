"""Bad values of the job spec: sizes beyond sense, values of another kind, paths that lead elsewhere."""

from __future__ import annotations

import random
from typing import Any

from services.common.spec.job import JobSpec
from tests.chaos.grammar.draft import Draft, Expected, Part, Parts

_HUGE = 10**30
_ODD: tuple[Any, ...] = (
    0, -1, 10**6, 10**9, _HUGE, 1e300, -1e-300, 0.5, True, False, None, "", "7", "x" * 10**5, [], [1], {}, {"a": 1}, "\0", "../..", 10**400,
)  # fmt: skip


def _value(path: str, *values: Any, expected: Expected = Expected.REFUSED) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        draft.set(path, rng.choice(values))
        draft.expect(expected)

    return part


def _values(settings: dict[str, Any], expected: Expected = Expected.REFUSED) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        for path, value in settings.items():
            draft.set(path, value)
        draft.expect(expected)

    return part


def _leaves(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> list[str]:
    """The paths of all fields of the spec."""
    node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    properties = node.get("properties")
    if not properties:
        return [path]
    return [leaf for name, item in properties.items() for leaf in _leaves(schema, item, f"{path}.{name}".lstrip("."))]


def _any(draft: Draft, rng: random.Random) -> None:
    """One or two fields that are drawn, with values that are drawn."""
    schema = JobSpec.model_json_schema()
    leaves = [leaf for leaf in _leaves(schema, schema) if leaf not in {"name", "data.eval"}]
    for path in rng.sample(leaves, rng.randint(1, 2)):
        draft.set(path, rng.choice(_ODD))
    draft.endless = True


def _section(draft: Draft, rng: random.Random) -> None:
    draft.spec[rng.choice(("model", "data", "rollout", "learner", "algorithm"))] = rng.choice(
        (None, 7, [], "x", {"nope": 1})
    )
    draft.expect(Expected.REFUSED)


def _endless(draft: Draft, _: random.Random) -> None:
    """Right in every part, and without end."""
    draft.set("learner.steps", 10_000_000)
    draft.endless = True


def _unrepresentable(draft: Draft, rng: random.Random) -> None:
    """Learning rates at which float32 weights overflow soon."""
    for path, value in {
        "learner.lr": 1.0,
        "learner.clip_grad": 0.0,
        "learner.lr_warmup_steps": 0,
        "rollout.temperature": rng.choice((5.0, 1e-30)),
    }.items():
        draft.set(path, value)


SPECS: Parts = {
    "spec: 4,096 ranks": _values({"learner.data_parallel_size": 4096}),
    "spec: 64 × 64 ranks": _values({"learner.tensor_parallel_size": 64, "learner.pipeline_parallel_size": 64}),
    "spec: a thousand threads a rank": _values({"learner.threads_per_rank": 1024}),
    "spec: a terabyte of keys and values": _values({"rollout.kv_cache_gib": 1024.0}),
    "spec: an engine over 64 devices": _values({"rollout.tensor_parallel_size": 64}),
    "spec: groups beyond sense": _values(
        {
            "rollout.group_size": 1024,
            "rollout.rollout_max_tokens": 4000,
            "algorithm.filter_groups_train_batch_size": 65_536,
            "off_policy.max_off_policy_steps": 1000,
            "rollout.max_concurrent_groups": 4096,
        }
    ),
    "spec: slots beyond sense": _values(
        {"algorithm.filter_groups_train_batch_size": 65_536, "off_policy.max_off_policy_steps": 1000}
    ),
    "spec: a verifier's terabyte": _values({"reward.memory_mib": 1_048_576}, Expected.HARMLESS),
    "spec: ten million steps": _endless,
    "spec: steps beyond the bound": _value("learner.steps", 10_000_001, 10**18, _HUGE, 10**400),
    "spec: a boolean as an integer": _value("learner.steps", True),
    "spec: a boolean as a size": _value("rollout.group_size", True, False),
    "spec: a boolean as a rate": _value("learner.lr", True),
    "spec: a text as an integer": _value("learner.steps", "2", " 2 ", "2.0", "０"),
    "spec: a text as a rate": _value("learner.lr", "1e-6", "nan", "inf"),
    "spec: a text as a boolean": _value("data.shuffle", "yes", "true", 1),
    "spec: a fraction as an integer": _value("learner.steps", 2.5, 1e300),
    "spec: an integer as a text": _value("model.path", 7, True, [], {}),
    "spec: a rate that is none": _value("learner.lr", 0, -1, 1e300, 10**400),
    "spec: a name that is none": _value("name", "", "X", "a/b", "x" * 64, "-a", "a\n", None, "a" * 10**6),
    "spec: an unknown key": _value("learner.nope", 1, None, {}),
    "spec: a section of another kind": _section,
    "spec: model elsewhere": _value(
        "model.path",
        "..",
        "../../etc",
        "/etc",
        "/",
        "nope",
        "",
        "\0",
        "scripted/../scripted/..",
        "x" * 1024,
        "~",
        "scripted\0",
    ),
    "spec: load from nowhere": _value(
        "checkpoint.load", "nope-12345678", "/etc", "../../../etc/passwd", "good", "", "scripted", "\0", "."
    ),
    "spec: evaluation beyond sense": _values(
        {"data.eval": {"source": "rows.jsonl"}, "eval": {"enabled": True, "tasks": 1_000_000, "samples": 1024}},
        Expected.HARMLESS,
    ),
    "spec: evaluation without tasks": _values({"eval": {"enabled": True}}),
    "spec: a hundred million tasks": _values(
        {"data.train": {"source": "reasoning_gym:chain_sum", "size": 100_000_000}}, Expected.HARMLESS
    ),
    "spec: a long template": _value("data.train.prompt_template", "{prompt}" * 8000, expected=Expected.HARMLESS),
    "spec: a long system prompt": _value("data.train.system_prompt", "x" * 65_000, expected=Expected.HARMLESS),
    "spec: the shortest time": _values(
        {"rollout.group_timeout_s": 1.0, "rollout.rollout_timeout_s": 0.1, "reward.timeout_s": 0.1}, Expected.HARMLESS
    ),
    "spec: one token a micro-batch": _values({"learner.max_tokens_per_micro_batch": 16}, Expected.HARMLESS),
    "spec: weights that overflow": _unrepresentable,
    "spec: longer than the model": _values({"model.max_model_len": 2_000_000}),
    "spec: a response longer than the model": _values({"rollout.rollout_max_tokens": 1_000_000}),
    "spec: a checkpoint each step": _values(
        {"checkpoint.interval_steps": 1, "checkpoint.keep_last": 1000}, Expected.HARMLESS
    ),
    **{f"spec: any field, draw {number}": _any for number in range(1, 11)},
}
