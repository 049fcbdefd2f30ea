"""What `millrace up` runs: the table of processes, with their environment, ports and cores.

| process | stage | waits for | cores (CPU platform) |
|---|---|---|---|
| redis | 2 | PING and its data loaded | any |
| gateway | 1 | /readyz | any |
| reward-0 | 0 | /readyz | any |
| learner-0 | 0 | /readyz | upper half |
| rollout-0 … | 0 | /readyz | lower half, for vLLM's threads |
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli.stack.cores import available_cores, plan_cores
from services.cli.stack.health import health_probe, ready_probe
from services.cli.stack.redis import EmbeddedRedis
from services.cli.stack.runtime import Runtime
from services.cli.stack.supervisor import KILL_MARGIN_S, ProcessSpec
from services.common.config.settings import Platform, Settings, address
from services.common.errors import ConfigError, DeadlineExceeded

START_TIMEOUT_S = 180.0
GATEWAY_TOKEN = "gateway.token"  # noqa: S105  the name of the file that the gateway keeps it in
INTERNAL_TOKEN = "internal.token"  # noqa: S105
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound to
_SECRETS = ("MILLRACE_TOKEN", "MILLRACE_TOKEN_FILE")


@dataclass(frozen=True, slots=True)
class Stack:
    """The table and what people need to know of it."""

    table: tuple[ProcessSpec, ...]
    url: str
    redis_url: str
    token_file: str | None


def plan_stack(
    settings: Settings, runtime: Runtime, *, servers: int, gateway_port: int, metrics_base: int | None
) -> Stack:
    """The stack of one machine.

    Args:
        settings: this process's; the services get the same environment.
        runtime: the home's own directories for what is temporary.
        servers: rollout servers.
        gateway_port: 0 takes a free one.
        metrics_base: first of the services' metrics ports, counting up; None takes free ones.

    Raises:
        ConfigError: a port is taken, or there is no Redis to start and REDIS_URL is not set.
    """
    home = settings.home.resolve()
    host = "127.0.0.1" if settings.bind_host in _ANY else settings.bind_host
    workers = ["reward-0", "learner-0", *(f"rollout-{number}" for number in range(servers))]
    port, *ports = _take_ports(settings.bind_host, gateway_port, metrics_base, len(workers))
    redis_url, redis = _plan_redis(home, runtime, settings.drain_timeout_s)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _SECRETS},
        "REDIS_URL": redis_url,
        "MILLRACE_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Where PyTorch compiles to: it must outlive the stack, and lie where nobody else can put files first.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(home / "cache" / "torchinductor")),
    }
    if settings.internal_token is None:
        environment["MILLRACE_INTERNAL_TOKEN_FILE"] = str(_make_internal_token(home))
    if runtime.shared is not None:
        environment["MILLRACE_SHARED_MEMORY"] = str(runtime.shared)
    services = [_gateway(settings, environment, host, port)]
    plan = plan_cores(available_cores() if settings.platform is Platform.CPU else [], servers)
    cores = {"learner-0": plan.learner, **{f"rollout-{i}": share for i, share in enumerate(plan.rollout)}}
    for name, metrics_port in zip(workers, ports, strict=True):
        services.append(_worker(settings, environment, host, name, metrics_port, cores.get(name, frozenset())))
    table = (*redis, *(_with_temporary(spec, runtime.temporary_of(spec.name)) for spec in services))
    return Stack(table, f"http://{address(host, port)}", redis_url, _token_file(settings, home))


def _plan_redis(home: Path, runtime: Runtime, drain_timeout_s: float) -> tuple[str, list[ProcessSpec]]:
    if url := os.environ.get("REDIS_URL"):
        return url, []
    redis = EmbeddedRedis(home / "redis", spare=runtime.temporary, log_path=home / "logs" / "redis.log")

    def ready(pid: int) -> str | None:
        return None if redis.answers(pid) else f"no answer on {redis.socket}"

    def healthy(pid: int) -> str | None:
        if not redis.answers(pid):
            raise DeadlineExceeded(f"no answer on {redis.socket}")
        return None

    spec = ProcessSpec(
        name="redis",
        argv=tuple(redis.argv),
        env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"},
        stage=2,
        ready=ready,
        healthy=healthy,
        start_timeout_s=60.0,
        drain_timeout_s=drain_timeout_s,
    )
    return redis.url, [spec]


def _gateway(settings: Settings, environment: dict[str, str], host: str, port: int) -> ProcessSpec:
    own = {"MILLRACE_GATEWAY_PORT": str(port), "MILLRACE_WORKER": "gateway"}
    own |= {name: os.environ[name] for name in _SECRETS if name in os.environ}
    return _service("gateway", "gateway", environment | own, f"http://{address(host, port)}", 1, settings, port)


def _worker(
    settings: Settings, environment: dict[str, str], host: str, name: str, port: int, cores: frozenset[int]
) -> ProcessSpec:
    own = {"MILLRACE_METRICS_PORT": str(port), "MILLRACE_WORKER": name}
    service = name.partition("-")[0]
    if service == "rollout" and cores:
        # Only vLLM's computing threads are bound: the process that feeds them may run where there is room.
        own["VLLM_CPU_OMP_THREADS_BIND"] = environment.get("VLLM_CPU_OMP_THREADS_BIND") or ",".join(
            map(str, sorted(cores))
        )
        cores = frozenset()
    if service == "reward":
        own["OMP_NUM_THREADS"] = "1"
    return _service(name, service, environment | own, f"http://{address(host, port)}", 0, settings, port, cores)


def _service(
    name: str,
    service: str,
    environment: dict[str, str],
    base: str,
    stage: int,
    settings: Settings,
    port: int,
    cores: frozenset[int] = frozenset(),
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", f"services.{service}"),
        env=environment,
        stage=stage,
        ready=ready_probe(f"{base}/readyz"),
        healthy=health_probe(f"{base}/healthz"),
        start_timeout_s=START_TIMEOUT_S,
        drain_timeout_s=settings.drain_timeout_s + KILL_MARGIN_S,
        port=port,
        cores=cores,
    )


def _with_temporary(spec: ProcessSpec, folder: Path) -> ProcessSpec:
    """The row with a TMPDIR of its own, whatever this process was told: what it leaves there when it is killed is its own alone."""
    return replace(spec, env=spec.env | {"TMPDIR": str(folder)}, temporary=folder)


def _make_internal_token(home: Path) -> Path:
    """The file with a new token of the services' gRPC, for this user only: on loopback, too, others can connect."""
    path = home / INTERNAL_TOKEN
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _token_file(settings: Settings, home: Path) -> str | None:
    """The file that has, or will have, the gateway's token: it makes one when nobody gave any."""
    if settings.token_file is not None:
        return str(settings.token_file.resolve())
    return None if settings.token is not None else str(home / GATEWAY_TOKEN)


def _take_ports(host: str, gateway_port: int, metrics_base: int | None, count: int) -> list[int]:
    """The gateway's port and `count` more, none of them taken a moment ago and all different."""
    wanted = [gateway_port, *(0 if metrics_base is None else metrics_base + number for number in range(count))]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as held:
        taken = []
        for number, port in enumerate(wanted):
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                option = "--metrics-base" if number else "--port"
                raise ConfigError(
                    f"port {port} on {host or 'all addresses'} cannot be taken ({error.strerror}): choose another with {option}"
                ) from error
            taken.append(int(probe.getsockname()[1]))
        return taken
