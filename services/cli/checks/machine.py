"""Machine checks: Python, cores, memory, disk space, the gateway's port and Docker, as far as this process may use them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.cli.stack.plan import available_cores, take_port
from services.common.service.host import CGROUP, container_memory

GIB = 1024**3
OLDEST_PYTHON, BEYOND_PYTHON = (3, 11), (3, 13)
MIN_MEMORY, GOOD_MEMORY = 2 * GIB, 6 * GIB
"""Below the first the demo's services do not even start; below the second their memory is soon short."""
GOOD_DISK = 10 * GIB
"""Checkpoints soon fill less than this. The smallest size that is accepted is a setting."""
DOCKER_TIMEOUT_S = 10.0
_DOCKER_REMEDY = "`millrace up` does without; for `docker compose up` see https://docs.docker.com/engine/install/"


def check_python(_: Subject) -> list[Finding]:
    """Whether the dependencies support the version of the Python that runs this command, and with it all services."""
    found = f"{platform.python_version()} at {sys.executable}"
    if OLDEST_PYTHON <= sys.version_info[:2] < BEYOND_PYTHON:
        return [ok("python", found)]
    return [problem("python", found, "use Python 3.11 or 3.12: make a virtual environment with it and install again")]


def check_cores(_: Subject) -> list[Finding]:
    """Whether learner and rollout servers can have separate cores."""
    cores = len(available_cores())
    if cores >= 2:
        return [ok("cores", f"{cores} cores")]
    remedy = "learner and rollout servers will share it: give this machine two or more"
    return [warning("cores", f"{cores} core", remedy)]


def check_memory(_: Subject) -> list[Finding]:
    """Memory that is free for new processes, within the container's limit where there is one."""
    free = available_memory()
    found = f"{free / GIB:.1f} GiB free of {psutil.virtual_memory().total / GIB:.1f} GiB"
    remedy = f"end other processes or raise the container's limit: at least {MIN_MEMORY / GIB:.0f} GiB, better {GOOD_MEMORY / GIB:.0f}"
    if free < MIN_MEMORY:
        return [problem("memory", found, remedy)]
    return [warning("memory", found, remedy) if free < GOOD_MEMORY else ok("memory", found)]


def check_disk(subject: Subject) -> list[Finding]:
    """Free space and write permission in the home, or in the nearest existing directory above it."""
    folder = next(path for path in (subject.home, *subject.home.parents) if path.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        return [problem("disk", f"{folder} is not writable", "choose another directory with --home (MILLRACE_HOME)")]
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {subject.home}"
    remedy = f"make room there or choose another --home: checkpoints need {GOOD_DISK / GIB:.0f} GiB and more"
    if free < subject.settings.min_free_gib * GIB:
        return [problem("disk", found, remedy)]
    return [warning("disk", found, remedy) if free < GOOD_DISK else ok("disk", found)]


def check_port(subject: Subject) -> list[Finding]:
    """Whether the gateway's port is free, or this home's gateway listens there."""
    if subject.state is not None:
        return [ok("port", f"the gateway of this home listens at {subject.state.url}")]
    host, port = subject.settings.bind_host, subject.settings.gateway_port
    if port == 0:
        return [ok("port", "a free one is taken")]
    try:
        take_port(host, port).close()
    except OSError as error:
        found = f"port {port} on {host} cannot be taken ({error.strerror}){_port_holder(port)}"
        return [problem("port", found, "choose another with --port (MILLRACE_GATEWAY_PORT)")]
    return [ok("port", f"port {port} on {host} is free")]


def check_docker(_: Subject) -> list[Finding]:
    """Whether the Docker engine answers, and the Compose plug-in is installed; only `docker compose` needs them."""
    engine = _run_docker("docker engine", ["docker", "version", "--format", "{{.Server.Version}}"])
    return [engine, _run_docker("docker compose", ["docker", "compose", "version"])]


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that new processes may take without swapping."""
    free, container = int(psutil.virtual_memory().available), container_memory(cgroup)
    return free if container is None else min(free, container.free)


def _port_holder(port: int) -> str:
    """The process that listens on the port, where this user may see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f": {psutil.Process(connection.pid).name()} (process {connection.pid}) has it"
    return ""


def _run_docker(name: str, command: list[str]) -> Finding:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return warning(name, "docker is not installed", _DOCKER_REMEDY)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning(name, f"no answer: {error}", _DOCKER_REMEDY)
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        return warning(name, f"does not answer: {output[0].rstrip('.')}", _DOCKER_REMEDY)
    if name == "docker compose" and "Compose" not in done.stdout:  # docker shows its own help then
        return warning(name, "the Compose plug-in is not installed", _DOCKER_REMEDY)
    return ok(name, done.stdout.strip())
