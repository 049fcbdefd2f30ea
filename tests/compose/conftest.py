"""Brings the compose stack up once, and takes it down with its volumes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stack import BUILD_S, ROOT, ComposeStack, MemoryWatch, can_have, missing_engine

GRAFANA = "grafana/grafana:11.6.0"


def say(text: str) -> None:
    sys.stdout.write(f"test-compose: {text}\n")
    sys.stdout.flush()


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where no engine runs."""
    trouble = missing_engine()
    if trouble:
        pytest.skip(trouble)


@pytest.fixture(scope="session")
def built(engine: None, tmp_path_factory: pytest.TempPathFactory) -> ComposeStack:  # noqa: ARG001
    """The images, and secrets."""
    stack = ComposeStack(tmp_path_factory.mktemp("compose"))
    subprocess.run(["sh", str(ROOT / "deploy/secrets.sh"), str(stack.secrets)], check=True, capture_output=True)
    started = time.monotonic()
    for service in (
        "redis",
        "prometheus",
        "gateway",
        "reward",
        "environment",
        "learner",
        "rollout",
    ):  # one at a time: rollout and learner share layers
        stack.compose("build", service, timeout_s=BUILD_S)
        say(f"{service} built after {time.monotonic() - started:.0f} s")
    return stack


@pytest.fixture(scope="session")
def stack(built: ComposeStack) -> Iterator[ComposeStack]:
    """All services, healthy, with the demo's model in their volume."""
    services = ["redis", "gateway", "reward", "environment", "learner", "rollout", "prometheus"]
    if can_have(GRAFANA):
        services.append("grafana")
    else:
        say(f"{GRAFANA} cannot be had here: the stack is started without it")
    remove(built)  # what a run that was killed has left
    started = time.monotonic()
    try:
        with MemoryWatch() as memory:
            built.compose("run", "--rm", "models", "tiny")
            say(f"the demo's model made in {time.monotonic() - started:.0f} s")
            built.compose("up", "--detach", "--wait", "--wait-timeout", "240", *services)
            say(f"all healthy after {time.monotonic() - started:.0f} s")
            yield built
        say(
            f"down after {time.monotonic() - started:.0f} s; peak memory of the containers {memory.peak_mib / 1024:.1f} GiB"
        )
    finally:
        keep_logs(built, Path(".pytest_cache/compose.log"))
        remove(built)


def remove(stack: ComposeStack) -> None:
    """Its containers, networks and volumes."""
    stack.compose("--profile", "tools", "down", "--volumes", "--remove-orphans", check=False)


def keep_logs(stack: ComposeStack, file: Path) -> None:
    """For those who want to know why."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(stack.compose("logs", "--timestamps", "--no-color", check=False))
    say(f"logs are in {file}")
