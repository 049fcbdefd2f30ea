"""Limits of an installation: the resources that one job may request, and the check of a spec against them.

The operator sets them as `MILLRACE_MAX_…`. On the CPU platform the defaults follow from the gateway's machine times
MILLRACE_LEARNER_NODES, since learner and engine usually run there too; with accelerators that machine does not describe the others, and
the defaults are wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import psutil

from services.common.config.settings import Platform, Settings
from services.common.errors import Problem
from services.common.models.directory import FIELD, ModelInfo
from services.common.models.roles import ROLES, named_models
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.common.streams.limits import largest_group, needed_bytes

GIB = 1 << 30
_LOOSE = 1 << 62
_DEVICES = 64
"""No machine has more accelerators."""
_TOKEN_BYTES = 64
"""Least memory of a token and its log-prob in Redis and the learner."""
_ENTRY_BYTES = 64 << 20
"""Of groups of 16 responses of 160,000 tokens. Redis serves nobody else for some tenths of a second while it copies such an entry."""
_TRAINED_BYTES = {DType.FLOAT32: (8, 8), DType.BFLOAT16: (6, 12)}
"""Bytes of a parameter in a rank: (itself and its gradient, Adam's moments and the master copy); the latter can be sharded."""
_RANK_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_STAGED = 2
"""Copies of the weights in transfer from learner to engine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Size of a machine, from which defaults are derived."""

    cores: int
    memory_bytes: int

    @classmethod
    def here(cls) -> Self:
        """This machine: all of it, even when this process may use only a part."""
        return cls(psutil.cpu_count() or 1, psutil.virtual_memory().total)


@dataclass(frozen=True, slots=True)
class InstallationLimits:
    """Largest values that one job may request."""

    ranks: int
    """Of all roles: TP × PP × DP × CP, times the pools."""
    threads: int
    """Of all ranks together."""
    engine_devices: int
    """rollout.tensor_parallel_size: processes of one engine."""
    kv_cache_gib: float
    """Of one engine on the CPU platform."""
    memory_gib: float
    """Of the weights, gradients, optimizer and KV cache of ranks and one engine together."""
    tokens_in_flight: int
    """Response tokens that all slots may hold."""
    rollouts_in_flight: int
    """Slots × group_size."""
    entry_bytes: int
    """Of a stream entry, which holds one group."""
    sequence_tokens: int
    """Prompt + response."""
    steps: int
    eval_rollouts: int
    """Of one evaluation: tasks × samples."""
    verifier_memory_mib: int
    """Of one check."""

    @classmethod
    def of(cls, settings: Settings, machine: Machine) -> Self:
        """The operator's settings, else the machine's defaults."""
        cpu, nodes = settings.platform is Platform.CPU, settings.learner_nodes
        memory_gib = machine.memory_bytes / GIB
        defaults = cls(
            ranks=(max(16, 4 * machine.cores) if cpu else _DEVICES) * nodes,
            threads=(max(64, 8 * machine.cores) if cpu else _DEVICES * 64) * nodes,
            engine_devices=max(8, machine.cores) if cpu else _DEVICES,
            kv_cache_gib=max(4.0, memory_gib / 2) if cpu else _LOOSE,
            memory_gib=memory_gib * nodes if cpu else _LOOSE,
            tokens_in_flight=max(16_777_216, machine.memory_bytes // _TOKEN_BYTES) if cpu else 1 << 32,
            rollouts_in_flight=1 << 20,
            entry_bytes=_ENTRY_BYTES,
            sequence_tokens=131_072 if cpu else 2_000_000,
            steps=1_000_000,
            eval_rollouts=1 << 20,
            verifier_memory_mib=max(4096, machine.memory_bytes // (4 << 20)) if cpu else 65_536,
        )
        own = {name: getattr(settings, f"max_{name}") for name in cls.__slots__}
        return replace(defaults, **{name: value for name, value in own.items() if value is not None})


def over_limits(
    spec: JobSpec,
    settings: Settings,
    machine: Machine,
    model: ModelInfo | None = None,
    parameters: Mapping[str, int] = MappingProxyType({}),
) -> list[Problem]:
    """Each field by which the job requests more than this installation allows; the message has the limit's name and both numbers.

    `parameters`: those of `model`, and of each role that has a model of its own, by section. What is missing is unknown and not counted.
    """
    limits = InstallationLimits.of(settings, machine)
    return [
        *_compute(spec, limits, settings.platform),
        *_work(spec, limits),
        *_lengths(spec, limits, model),
        *_memory(spec, limits, parameters),
    ]


def _compute(spec: JobSpec, limits: InstallationLimits, platform: Platform) -> Iterator[Problem]:
    learner, engine = spec.learner, spec.rollout
    if spec.takes_turns and platform is not Platform.CPU:
        yield Problem(
            "placement.rollout",
            f"colocated is for CPUs so far, and this installation runs on {platform.value}: leave it out",
        )
    sizes = {name: getattr(learner, name) for name in _RANK_SIZES}
    field = f"learner.{max(sizes, key=sizes.__getitem__)}"
    if learner.world_size <= limits.ranks and len(spec.pools) > 1:
        field = f"{spec.pools[-1][0]}.placement"
    yield from _over(field, spec.world_size, "ranks", "ranks", limits)
    if platform is Platform.CPU:
        if learner.threads_per_rank > 1:  # else the problem is one of the ranks, and reported above
            threads = spec.world_size * learner.threads_per_rank
            yield from _over("learner.threads_per_rank", threads, "threads of all ranks", "threads", limits)
        yield from _over("rollout.kv_cache_gib", engine.kv_cache_gib, "GiB", "kv_cache_gib", limits)
    devices = engine.tensor_parallel_size
    yield from _over("rollout.tensor_parallel_size", devices, "processes of one engine", "engine_devices", limits)
    yield from _over("reward.memory_mib", spec.reward.memory_mib, "MiB", "verifier_memory_mib", limits)


def _work(spec: JobSpec, limits: InstallationLimits) -> Iterator[Problem]:
    rollouts = spec.slots * spec.rollout.group_size
    field, what = "algorithm.filter_groups_train_batch_size", "rollouts in flight (slots × group_size)"
    yield from _over(field, rollouts, what, "rollouts_in_flight", limits)
    tokens = rollouts * spec.rollout.rollout_max_tokens
    what = "tokens in flight (slots × group_size × rollout_max_tokens)"
    yield from _over("rollout.rollout_max_tokens", tokens, what, "tokens_in_flight", limits)
    yield from _entry(spec, limits)
    yield from _over("learner.steps", spec.learner.steps, "steps", "steps", limits)
    if spec.eval.enabled:
        rollouts = spec.eval.tasks * spec.eval.samples
        yield from _over("eval.tasks", rollouts, "rollouts of an evaluation (tasks × samples)", "eval_rollouts", limits)


def _entry(spec: JobSpec, limits: InstallationLimits) -> Iterator[Problem]:
    """A group of full-length responses fits into one entry."""
    group, tokens = largest_group(spec.rollout, spec.eval), spec.rollout.rollout_max_tokens
    size = "rollout.group_size" if group == spec.rollout.group_size else "eval.samples"
    what = f"bytes that a group may take in a stream ({size} {group} × rollout_max_tokens {tokens})"
    yield from _over("rollout.rollout_max_tokens", needed_bytes(spec.rollout, spec.eval), what, "entry_bytes", limits)


def _lengths(spec: JobSpec, limits: InstallationLimits, model: ModelInfo | None) -> Iterator[Problem]:
    """The engine allocates for `model.max_model_len`, or else for all positions of the model."""
    length, field = spec.model.max_model_len, "model.max_model_len"
    if length is not None:
        yield from _over(field, length, "tokens", "sequence_tokens", limits)
    elif model is not None:
        what = "tokens (the model's positions, since it is not set)"
        yield from _over(field, model.max_position_embeddings, what, "sequence_tokens", limits)
    yield from _over("rollout.rollout_max_tokens", spec.rollout.rollout_max_tokens, "tokens", "sequence_tokens", limits)


def _memory(spec: JobSpec, limits: InstallationLimits, parameters: Mapping[str, int]) -> Iterator[Problem]:
    """The field is that of the role by which the job becomes too large, in the order actor, critic, reference."""
    if "model" not in parameters:
        return
    named = named_models(spec)
    staged = parameters["model"] * _weight_bytes(spec) * (1 + _STAGED)
    needed, counts = staged / GIB + spec.rollout.kv_cache_gib, []
    for role in ("model", *ROLES):
        count = parameters.get(role) if role in {"model", *named} else parameters["model"]
        if getattr(spec, role) is None or count is None:
            continue
        needed += count * _rank_bytes(spec, role) / GIB
        counts.append(f"{count} parameters" if role == "model" else f"{count} of the {role}")
        field = FIELD if role == "model" else f"{role}.path" if role in named else role
        what = f"GiB of memory for {' + '.join(counts)} in ranks and one engine"
        problems = [*_over(field, round(needed, 1), what, "memory_gib", limits)]
        if problems:
            yield from problems
            return


def _weight_bytes(spec: JobSpec) -> int:
    return 4 if spec.model.dtype is DType.FLOAT32 else 2


def _rank_bytes(spec: JobSpec, role: str) -> int:
    """Bytes that all ranks together hold of a role for each of its parameters; a reference has neither gradients nor an optimizer."""
    learner, replicas = spec.learner, spec.learner.replicas
    if role == "reference":
        return _weight_bytes(spec) * replicas
    model_bytes, optimizer_bytes = _TRAINED_BYTES[spec.model.dtype]
    return model_bytes * replicas + optimizer_bytes * (1 if learner.use_distributed_optimizer else replicas)


def _over(field: str, value: float, what: str, name: str, limits: InstallationLimits) -> Iterator[Problem]:
    limit = getattr(limits, name)
    if value > limit:
        message = f"{value:.15g} {what} are more than MILLRACE_MAX_{name.upper()}={limit:.15g} of this installation"
        yield Problem(field, message)
