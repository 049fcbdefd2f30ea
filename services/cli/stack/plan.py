"""Plan of a stack: the table of the processes that `millrace up` runs, with their environments, ports and cores.

| process | stage | waits for | cores (CPU platform) |
|---|---|---|---|
| redis | 2 | PING and its data loaded | any |
| gateway | 1 | /readyz | any |
| reward-0 | 0 | /readyz | any |
| environment-0 | 0 | /readyz | any |
| learner-0 | 0 | /readyz | upper half |
| rollout-0 … | 0 | /readyz | lower half, for vLLM's threads |
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from services.cli.stack.health import HEALTH_TIMEOUT_S, READY_TIMEOUT_S, http_probe
from services.cli.stack.redis import EmbeddedRedis
from services.cli.stack.runtime import Runtime
from services.cli.stack.supervisor import KILL_MARGIN_S, ProcessSpec
from services.common.config.settings import Platform, Settings, address
from services.common.errors import ConfigError, DeadlineExceeded
from services.common.sandbox.processes import HUB_TOKENS

START_TIMEOUT_S = 180.0
GATEWAY_TOKEN = "gateway.token"  # noqa: S105  the name of the file in which the gateway stores it
INTERNAL_TOKEN = "internal.token"  # noqa: S105
_NO_CONNECTIONS = range(20_000, 32_768)
"""Ports below those that Linux gives to connections, and to servers that ask for any."""
_TRIES = 50
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound to
_SECRETS = (
    *(
        f"MILLRACE_{secret}"
        for secret in ("TOKEN", "MLFLOW_TOKEN", "MLFLOW_PASSWORD", "WANDB_API_KEY", "SWANLAB_API_KEY")
    ),
    *HUB_TOKENS,
)
_GATEWAYS_OWN = tuple(f"{secret}{suffix}" for secret in _SECRETS for suffix in ("", "_FILE"))
"""Secrets that the other services do not get."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The table of processes, and the addresses for users."""

    table: tuple[ProcessSpec, ...]
    url: str
    redis_url: str
    token_file: str | None


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores of each process; empty sets where there are too few cores to divide."""

    learner: frozenset[int]
    rollout: tuple[frozenset[int], ...]
    """One set per server."""


def plan_stack(
    settings: Settings, runtime: Runtime, *, servers: int, gateway_port: int, metrics_base: int | None
) -> Stack:
    """The stack of one machine; its services receive this process's environment.

    `servers`: rollout servers. `gateway_port`: 0 takes a free one. `metrics_base`: first of the services' metrics ports,
    counting up; None takes free ones. Raises ConfigError when a port is taken, there is no Redis to start or given, or a
    Python that is named cannot be started.
    """
    home = settings.home.resolve()
    host = "127.0.0.1" if settings.bind_host in _ANY else settings.bind_host
    names = ["gateway", "reward-0", "environment-0", "learner-0", *(f"rollout-{number}" for number in range(servers))]
    ports = _take_ports(settings.bind_host, gateway_port, metrics_base, len(names) - 1)
    redis_url, table = _plan_redis(home, runtime, settings.drain_timeout_s)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _GATEWAYS_OWN},
        "REDIS_URL": redis_url,
        "MILLRACE_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # PyTorch's compiled code: it must outlive the stack, in a directory where no other user can put files first.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(home / "cache" / "torchinductor")),
    }
    if settings.internal_token is None:
        environment["MILLRACE_INTERNAL_TOKEN_FILE"] = str(_make_internal_token(home))
    if runtime.shared is not None:
        environment["MILLRACE_SHARED_MEMORY"] = str(runtime.shared)
    plan = plan_cores(available_cores() if settings.platform is Platform.CPU else [], servers)
    if plan.learner:
        environment.setdefault("MILLRACE_LEARNER_CORES", str(len(plan.learner)))
        environment["MILLRACE_STACK_CORES"] = ",".join(map(str, available_cores()))
    cores = {"learner-0": plan.learner, **{f"rollout-{i}": share for i, share in enumerate(plan.rollout)}}
    for name, port in zip(names, ports, strict=True):
        folder, own_cores = runtime.temporary_of(name), cores.get(name, frozenset())
        table.append(_plan_service(name, host, port, settings, environment, folder, own_cores))
    return Stack(tuple(table), f"http://{address(host, ports[0])}", redis_url, _token_file(settings, home))


def available_cores() -> list[int]:
    """Cores that this process may run on, in order; empty where affinity is unknown, so that nothing is pinned."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def take_port(host: str, port: int) -> socket.socket:
    """A TCP socket with this port of the address; 0 takes a free one. Raises OSError when it cannot be taken.

    A free one is none that a connection has by chance before the service that is to listen there has started.
    """
    if port == 0:
        for number in random.sample(_NO_CONNECTIONS, _TRIES):
            with suppress(OSError):
                return take_port(host, number)
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def plan_cores(cores: Sequence[int], servers: int) -> CorePlan:
    """The lower half of the cores (rounded down) for the rollout servers, the rest for the learner.

    Servers get equal, separate shares; when there are fewer cores than servers, each server gets all of them.
    """
    if len(cores) < 2:
        return CorePlan(frozenset(), (frozenset(),) * servers)
    half = len(cores) // 2
    shared, learner = list(cores[:half]), frozenset(cores[half:])
    share = len(shared) // max(1, servers)
    if not share:
        return CorePlan(learner, (frozenset(shared),) * servers)
    return CorePlan(learner, tuple(frozenset(shared[i * share : (i + 1) * share]) for i in range(servers)))


def _plan_redis(home: Path, runtime: Runtime, drain_timeout_s: float) -> tuple[str, list[ProcessSpec]]:
    if url := os.environ.get("REDIS_URL"):
        return url, []
    redis = EmbeddedRedis(home / "redis", spare=runtime.temporary)

    def probe(pid: int) -> str | None:
        if not redis.answers(pid):
            raise DeadlineExceeded(f"no answer on {redis.socket}")
        return None

    argv, env = tuple(redis.argv), {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}
    spec = ProcessSpec(
        "redis", argv, env, stage=2, ready=probe, healthy=probe, start_timeout_s=60.0, drain_timeout_s=drain_timeout_s
    )
    return redis.url, [spec]


def _plan_service(
    name: str, host: str, port: int, settings: Settings, env: dict[str, str], folder: Path, cores: frozenset[int]
) -> ProcessSpec:
    kind, base = name.partition("-")[0], f"http://{address(host, port)}"
    # Each service has its own TMPDIR, whatever this process has: files that are left there after a kill belong to it alone.
    own = {"MILLRACE_WORKER": name, "TMPDIR": str(folder)}
    own["MILLRACE_GATEWAY_PORT" if kind == "gateway" else "MILLRACE_METRICS_PORT"] = str(port)
    if kind == "gateway":
        own |= {variable: os.environ[variable] for variable in _GATEWAYS_OWN if variable in os.environ}
    elif kind == "reward":
        own["OMP_NUM_THREADS"] = "1"
    elif kind == "rollout" and cores:
        # vLLM binds the process that computes, all its threads; the service that feeds it may run on any core.
        bound = ",".join(map(str, sorted(cores)))
        own["VLLM_CPU_OMP_THREADS_BIND"] = env.get("VLLM_CPU_OMP_THREADS_BIND") or bound
        cores = frozenset()
    return ProcessSpec(
        name=name,
        argv=(_python(kind, settings), "-m", f"services.{kind}"),
        env=env | own,
        stage=1 if kind == "gateway" else 0,
        ready=http_probe(f"{base}/readyz", READY_TIMEOUT_S),
        healthy=http_probe(f"{base}/healthz", HEALTH_TIMEOUT_S),
        start_timeout_s=START_TIMEOUT_S,
        drain_timeout_s=settings.drain_timeout_s + KILL_MARGIN_S,
        port=port,
        cores=cores,
        temporary=folder,
    )


def _python(kind: str, settings: Settings) -> str:
    """The Python of a service. Raises ConfigError where the one that is named cannot be started."""
    own = settings.environment_python
    if kind != "environment" or own is None:
        return sys.executable
    if not (own.is_file() and os.access(own, os.X_OK)):
        raise ConfigError(f"MILLRACE_ENVIRONMENT_PYTHON: there is no program {own}")
    return str(own.absolute())


def _make_internal_token(home: Path) -> Path:
    """A file with a new token for the services' gRPC, readable by this user only: other users can connect on loopback, too."""
    path = home / INTERNAL_TOKEN
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _token_file(settings: Settings, home: Path) -> str | None:
    """The file of the gateway's token; the gateway creates it when no token is given."""
    if settings.token_file is not None:
        return str(settings.token_file.resolve())
    return None if settings.token is not None else str(home / GATEWAY_TOKEN)


def _take_ports(host: str, gateway_port: int, metrics_base: int | None, count: int) -> list[int]:
    """The gateway's port and `count` more ports, all different and free at the time of the call."""
    wanted = [gateway_port, *(0 if metrics_base is None else metrics_base + number for number in range(count))]
    with ExitStack() as sockets:
        taken = []
        for number, port in enumerate(wanted):
            try:
                probe = sockets.enter_context(take_port(host, port))
            except OSError as error:
                option, where = "--metrics-base" if number else "--port", f"port {port} on {host or 'all addresses'}"
                message = f"{where} cannot be taken ({error.strerror}): choose another with {option}"
                raise ConfigError(message) from error
            taken.append(int(probe.getsockname()[1]))
        return taken
