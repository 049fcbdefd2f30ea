"""The compose stack under test: a project of its own, with secrets and ports of its own, on whatever engine `docker` talks to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from millrace.gateway import GatewayClient
from services.cli.stack.children import free_port

ROOT = Path(__file__).parents[2]
PROJECT = "millrace-test"
KEPT = ("MILLRACE_MODELS_DIR", "MILLRACE_WHEELS")
"""Variables of the caller's that hold here too: a directory with the demo's model in it saves making one."""
BUILD_S = 1800.0
COMMAND_S = 300.0
HELP = "install Docker Engine 25 or newer with Compose v2 (https://docs.docker.com/engine/install), or point DOCKER_HOST at one"


def missing_engine() -> str | None:
    """Why no stack can be started here, or None."""
    if shutil.which("docker") is None:
        return f"there is no `docker` on the PATH: {HELP}"
    for words in (["docker", "info"], ["docker", "compose", "version"], ["docker", "buildx", "version"]):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return f"`{' '.join(words)}` fails ({(done.stderr.strip() or 'no answer').splitlines()[-1]}): {HELP}"
    return None


def local_image(*names: str) -> str | None:
    """The first of the images that the engine has."""
    for name in names:
        if (
            subprocess.run(
                ["docker", "image", "inspect", name], capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        ):
            return name
    return None


def can_have(image: str) -> bool:
    """Whether the engine has the image or can pull it."""
    if local_image(image):
        return True
    return (
        subprocess.run(["docker", "pull", "--quiet", image], capture_output=True, timeout=600, check=False).returncode
        == 0
    )


class ComposeStack:
    """Drives `docker compose` as a person would, from the repository's root."""

    def __init__(self, folder: Path) -> None:
        """Starts nothing; secrets go below `folder`."""
        self.secrets = folder / "secrets"
        self.port = free_port()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_") or name in KEPT},
            "COMPOSE_PROJECT_NAME": PROJECT,
            "MILLRACE_SECRETS": str(self.secrets),
            "MILLRACE_GATEWAY_PORT": str(self.port),
            "MILLRACE_GRAFANA_PORT": str(free_port()),
            "MILLRACE_TAG": "test",
            **_sources(),
        }

    def secret(self, name: str) -> str:
        """A secret's value."""
        return (self.secrets / name).read_text()

    def compose(self, *words: str, timeout_s: float = COMMAND_S, check: bool = True, **variables: str) -> str:
        """Runs a compose command; what it printed.

        Raises:
            AssertionError: it failed (unless `check` is off); with its output.
        """
        done = subprocess.run(
            ["docker", "compose", *words], cwd=ROOT, env=self.environment | variables, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 0 or not check, (
            f"docker compose {' '.join(words)}: code {done.returncode}\n{said[-6000:]}"
        )
        return said

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What `docker inspect` says of a service's containers."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        if not ids:
            return []
        done = subprocess.run(["docker", "inspect", *ids], capture_output=True, text=True, timeout=60, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def client(self) -> GatewayClient:
        """A client of the gateway, from outside."""
        return GatewayClient(f"http://127.0.0.1:{self.port}", self.secret("gateway_token"))

    def address(self, service: str) -> str:
        """Address of a service that is not published, which the engine's own machine reaches."""
        networks = self.containers(service)[0]["NetworkSettings"]["Networks"]
        return str(networks[f"{PROJECT}_internal"]["IPAddress"])

    def wait(self, what: str, reached: Callable[[], bool], timeout_s: float) -> None:
        """Waits until it is so.

        Raises:
            AssertionError: it was not in time; with the end of the services' logs.
        """
        deadline = time.monotonic() + timeout_s
        while not reached():
            assert time.monotonic() < deadline, (
                f"not within {timeout_s:.0f} s: {what}\n{self.compose('logs', '--tail', '15')}"
            )
            time.sleep(1.0)


class MemoryWatch:
    """Notes the largest sum of what the project's containers use, and of each service."""

    def __init__(self) -> None:
        """Watches from `with` on."""
        self.peak_mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        words = ["docker", "stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}"]
        while not self._stop.wait(2.0):
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            used = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(PROJECT)]
            self.peak_mib = max(self.peak_mib, sum(map(mebibytes, used)))


def mebibytes(text: str) -> float:
    """`1.5GiB` → 1536."""
    for unit, factor in (("KiB", 1 / 1024), ("MiB", 1.0), ("GiB", 1024.0), ("B", 1 / 1024**2)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise ValueError(f"not an amount of memory: {text}")


def _sources() -> dict[str, str]:
    """Where builds find what this machine is set up to use: pip's wheel directory, and base images under other tags."""
    found = {}
    wheels = Path(os.environ.get("PIP_FIND_LINKS", "/nowhere"))
    if wheels.is_dir() and "MILLRACE_WHEELS" not in os.environ:
        found["MILLRACE_WHEELS"] = str(wheels)
    image = local_image("prom/prometheus:v3.5.0", "prom/prometheus:latest")
    if image and "PROMETHEUS_IMAGE" not in os.environ:
        found["PROMETHEUS_IMAGE"] = image
    return found
