"""The Docker engine and its Compose plug-in: only `docker compose` needs them."""

from __future__ import annotations

import subprocess

from services.cli.checks.finding import Finding, Subject, ok, warning

TIMEOUT_S = 10.0
_REMEDY = "`millrace up` does without; for `docker compose up` see https://docs.docker.com/engine/install/"


def check_docker(_: Subject) -> list[Finding]:
    """Whether an engine answers, and Compose is there."""
    return [
        _ask("docker engine", ["docker", "version", "--format", "{{.Server.Version}}"]),
        _ask("docker compose", ["docker", "compose", "version"]),
    ]


def _ask(name: str, command: list[str]) -> Finding:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        return warning(name, "docker is not installed", _REMEDY)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning(name, f"no answer: {error}", _REMEDY)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        return warning(name, f"does not answer: {said[0].rstrip('.')}", _REMEDY)
    if name == "docker compose" and "Compose" not in done.stdout:
        return warning(name, "the Compose plug-in is not installed", _REMEDY)  # docker shows its own help then
    return ok(name, done.stdout.strip())
