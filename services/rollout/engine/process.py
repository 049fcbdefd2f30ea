"""Processes of the engine: vLLM's `AsyncLLM` is started for a model, and ended with every process that it started."""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from services.common.config.settings import Platform
from services.common.service.process_tree import family, is_running, kill
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.rollout.engine.platform import plan_engine
from services.rollout.engine.stamps import TOKENS_PER_PIECE

log = logging.getLogger(__name__)

T = TypeVar("T")

CHAT_PLACES = 2
"""Chat answers that an engine samples at once, in addition to its rollouts."""
_MAX_SEQUENCES = 1024
_SHUTDOWN_TIMEOUT_S = 10.0
_EXTENSION = "services.rollout.engine.worker_extension.WeightExtension"
_OPERATORS = dict(os.environ)
"""Variables before an engine was started."""
_READ = frozenset({".json", ".jinja"})
_NOT_ENGINES = ("resource_tracker", "services.common.sandbox.forkserver")
"""Other children of this process, by a word of their command lines: Python's own helper, and the tokenizers' forkserver."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Inputs of an engine's start: an engine with an equal key serves the next job too."""

    model_dir: Path
    files: tuple[tuple[str, int, int], ...]
    """Name, size and modification time (ns) of the model's files with its shape, its tokenizer and its chat template."""
    arguments: tuple[tuple[str, Any], ...]
    chat_template: str | None
    takes_turns: bool
    """Whether it computes on the learner's cores too."""


def engine_key(model_dir: Path, spec: JobSpec) -> EngineKey:
    """The key of the engine that this job needs. Raises OSError when the model directory cannot be read."""
    facts = [(path.name, path.stat()) for path in sorted(model_dir.iterdir()) if path.suffix in _READ]
    files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts)
    return EngineKey(
        model_dir, files, tuple(sorted(_arguments(spec).items())), spec.model.chat_template, spec.takes_turns
    )


def start_vllm(platform: Platform, model_dir: Path, spec: JobSpec) -> Any:  # noqa: ANN401  vLLM is untyped here
    """A started `AsyncLLM`. Blocks until it is up: run it in a thread."""
    plan = plan_engine(platform, spec, _OPERATORS)
    os.environ.update(plan.environment)
    os.environ[SERVICE_PID] = str(os.getpid())

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model_dir),
        worker_extension_cls=_EXTENSION,
        logprobs_mode="processed_logprobs",  # after temperature: what the learner recomputes
        stream_interval=1,
        trust_remote_code=False,
        load_format="safetensors",
        # Two servers, and one server before and after a restart, must not draw the same samples.
        seed=secrets.randbelow(2**31),
        scheduling_policy="priority",  # rollouts first, then chats
        **_arguments(spec),
        **plan.arguments,
    )
    config = arguments.create_engine_config()
    with _worker_cores(platform, config):
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def _worker_cores(platform: Platform, config: Any) -> AbstractContextManager[None]:  # noqa: ANN401
    """The environment that keeps a CPU worker's threads on its cores. vLLM sets it for workers in processes of their own only."""
    if platform is not Platform.CPU or config.parallel_config.world_size > 1:
        return contextlib.nullcontext()
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    cores: AbstractContextManager[None] = OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0)
    return cores


def pieces_of_several_tokens() -> dict[str, int]:
    """Sampling parameters of a rollout, by which its outputs come in pieces of several tokens; empty where vLLM has none."""
    from vllm import SamplingParams

    return {"stream_interval": TOKENS_PER_PIECE} if "stream_interval" in SamplingParams.__struct_fields__ else {}


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Runs blocking work that may outlast the event loop: a process that ends does not wait for it, unlike `asyncio.to_thread`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(deliver: Callable[[Any], None], outcome: object) -> None:
        if not done.done():  # else the future was cancelled
            deliver(outcome)

    def run() -> None:
        deliver: Callable[[Any], None] = done.set_exception
        outcome: object
        try:
            deliver, outcome = done.set_result, context.run(work)
        except Exception as error:  # noqa: BLE001  raised where the result is awaited, whatever it is
            outcome = error
        except BaseException as error:  # noqa: BLE001  it would end the event loop that awaits the result
            outcome = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, deliver, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def stop_vllm(llm: Any, started: list[psutil.Process]) -> None:  # noqa: ANN401
    """Shuts the engine down, then kills those of its processes that are left. Blocks."""
    processes = {child.pid: child for parent in started for child in family(parent)}
    if llm is not None:
        llm.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
    _, left = psutil.wait_procs(list(processes.values()), timeout=2.0)
    kill(left)
    _, alive = psutil.wait_procs(left, timeout=5.0)
    stuck = [process for process in alive if is_running(process)]
    if stuck:
        log.error("engine processes cannot be killed: %s", [process.pid for process in stuck])


def children() -> list[psutil.Process]:
    """Child processes of this one that belong to an engine."""
    return [child for child in psutil.Process().children() if not _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any(name in word for word in process.cmdline() for name in _NOT_ENGINES)
    except psutil.Error:
        return False


def _arguments(spec: JobSpec) -> dict[str, Any]:
    head = {"hf_overrides": {"head_dtype": DType.FLOAT32.value}} if spec.model.fp32_output_layer else {}
    return head | {
        "dtype": spec.model.dtype.value,
        "max_model_len": spec.model.max_model_len,
        "tensor_parallel_size": spec.rollout.tensor_parallel_size,
        "enforce_eager": spec.rollout.enforce_eager,
        # Chats have places of their own: they never take the place of a rollout.
        "max_num_seqs": min(_MAX_SEQUENCES, spec.rollout.max_concurrent_groups * spec.rollout.group_size) + CHAT_PLACES,
        # Within a group only: every request has its own salt, so that no prompt uses keys and values of older weights.
        "enable_prefix_caching": True,
    }


SERVICE_PID = "MILLRACE_ROLLOUT_PID"
"""Environment variable with the service's process id, for the engine's processes."""


def watch_service() -> None:
    """Ends this process, and the engine's core process, its parent, when the service has ended. Linux only; elsewhere it does nothing."""
    pid = os.environ.get(SERVICE_PID)
    if pid is None or not hasattr(os, "pidfd_open"):
        return
    service, parent = int(pid), os.getppid()
    try:
        service_fd = os.pidfd_open(service)
        core = parent if parent != service and psutil.Process(parent).ppid() == service else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        os._exit(1)  # the service has ended already; the core process detects that its worker is gone
    threading.Thread(target=_end_with, args=(service_fd, core), name="service-watch", daemon=True).start()


def _end_with(service_fd: int, core: int | None) -> None:
    select.select([service_fd], [], [])  # the descriptor of a process is readable once the process has ended
    if core is not None and os.getppid() == core:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os._exit(1)
