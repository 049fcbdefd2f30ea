"""Starts vLLM's `AsyncLLM` for a model, and ends it with every process that it started."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import secrets
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

from services.common.config.settings import Platform
from services.common.service.process_tree import family, is_running, kill
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.rollout.engine.platform import plan_engine

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SEQUENCES = 1024
CHAT_PLACES = 2
"""Answers to people that an engine samples at once, beside its rollouts."""
SHUTDOWN_S = 10.0
_EXTENSION = "services.rollout.engine.worker_extension.WeightExtension"
_AROUND = ("resource_tracker", "services.common.sandbox.forkserver")
"""What else this process starts, by a word of its command line: Python's own helper, and the tokenizers' forkserver."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """What an engine was started with: with an equal key it serves the next job too."""

    model_dir: Path
    files: tuple[tuple[str, int, int], ...]
    """Name, size and time of the model's JSON files: its shape and its tokenizer."""
    arguments: tuple[tuple[str, Any], ...]


def engine_key(model_dir: Path, spec: JobSpec) -> EngineKey:
    """The key of the engine that this job needs.

    Raises:
        OSError: the model directory cannot be read.
    """
    facts = [(path.name, path.stat()) for path in sorted(model_dir.glob("*.json"))]
    files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts)
    return EngineKey(model_dir, files, tuple(sorted(_arguments(spec).items())))


def start_vllm(platform: Platform, model_dir: Path, spec: JobSpec) -> Any:  # noqa: ANN401  vLLM is untyped here
    """A started `AsyncLLM`. Blocks for as long as that takes: run it in a thread."""
    plan = plan_engine(platform, spec, os.environ)
    os.environ.update(plan.environment)
    os.environ[SERVICE_PID] = str(os.getpid())

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model_dir),
        worker_extension_cls=_EXTENSION,
        logprobs_mode="processed_logprobs",  # after temperature: what the learner recomputes
        stream_interval=1,
        disable_log_stats=True,
        trust_remote_code=False,
        load_format="safetensors",
        # Servers, and one server after a restart, must not draw the same samples.
        seed=secrets.randbelow(2**31),
        scheduling_policy="priority",  # rollouts first, people's chats behind them
        **_arguments(spec),
        **plan.arguments,
    )
    return AsyncLLM.from_engine_args(arguments)


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Runs blocking work that may outlast the event loop: a process that ends does not wait for it, unlike `asyncio.to_thread`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", result))

    context = contextvars.copy_context()

    def run() -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = context.run(work)
        except Exception as problem:  # noqa: BLE001  handed to whoever waits, whatever it is
            error = problem
        except BaseException as problem:  # noqa: BLE001  one that would end the event loop of whoever waits
            error = RuntimeError(f"{type(problem).__name__}: {problem}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def stop_vllm(llm: Any, started: list[psutil.Process]) -> None:  # noqa: ANN401
    """Shuts the engine down, then makes sure that none of the processes it started is left. Blocks."""
    everyone = {child.pid: child for parent in started for child in family(parent)}
    if llm is not None:
        llm.shutdown(timeout=SHUTDOWN_S)
    _, left = psutil.wait_procs(list(everyone.values()), timeout=2.0)
    kill(left)
    _, late = psutil.wait_procs(left, timeout=5.0)
    stuck = [process for process in late if is_running(process)]
    if stuck:
        log.error("engine processes cannot be killed: %s", [process.pid for process in stuck])


def children() -> list[psutil.Process]:
    """Processes that this one has started, those left out that are no engine's."""
    return [child for child in psutil.Process().children() if not _is_around(child)]


def _is_around(process: psutil.Process) -> bool:
    try:
        return any(name in word for word in process.cmdline() for name in _AROUND)
    except psutil.Error:
        return False


def _arguments(spec: JobSpec) -> dict[str, Any]:
    head = {"hf_overrides": {"head_dtype": DType.FLOAT32.value}} if spec.model.fp32_output_layer else {}
    return head | {
        "dtype": spec.model.dtype.value,
        "max_model_len": spec.model.max_model_len,
        "tensor_parallel_size": spec.rollout.tensor_parallel_size,
        "enforce_eager": spec.rollout.enforce_eager,
        # Chats have places of their own: they never take a rollout's.
        "max_num_seqs": min(MAX_SEQUENCES, spec.rollout.max_concurrent_groups * spec.rollout.group_size) + CHAT_PLACES,
        # Within a group only: every request has its own salt, so no prompt is answered from the keys of older weights.
        "enable_prefix_caching": True,
    }


SERVICE_PID = "MILLRACE_ROLLOUT_PID"
"""Environment variable that names the service's process to the engine's."""


def watch_service() -> None:
    """Ends this process, and the engine's core process above it, when the service has ended. Linux only; elsewhere it does nothing."""
    name = os.environ.get(SERVICE_PID)
    if name is None or not hasattr(os, "pidfd_open"):
        return
    service, parent = int(name), os.getppid()
    try:
        watched = os.pidfd_open(service)
        core = parent if parent != service and psutil.Process(parent).ppid() == service else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        os._exit(1)  # it has ended already; the core process notices that its worker is gone
    threading.Thread(target=_wait, args=(watched, core), name="service-watch", daemon=True).start()


def _wait(watched: int, core: int | None) -> None:
    select.select([watched], [], [])  # a process's descriptor is readable once it has ended
    if core is not None and os.getppid() == core:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os._exit(1)
