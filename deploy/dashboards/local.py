"""A Prometheus beside `millrace up`: `python -m deploy.dashboards.local --home .millrace > prometheus.yml` prints its configuration."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import yaml

from deploy.dashboards.survey import RULES, Prometheus
from services.cli.stack.children import free_port
from services.common.errors import ConfigError, DeadlineExceeded
from services.common.service.stack_state import UpState, require_state

START_TIMEOUT_S = 30.0


def local_config(state: UpState, *, interval_s: int = 5) -> str:
    """Prometheus' configuration for a stack of this machine, with the alert rules."""
    host = urlsplit(state.url).hostname or "127.0.0.1"
    targets: dict[str, list[str]] = {}
    for name, process in state.processes.items():
        if process.port is not None:
            targets.setdefault(name.partition("-")[0], []).append(f"{host}:{process.port}")
    jobs = [
        {"job_name": f"millrace-{service}", "static_configs": [{"targets": ports}]}
        for service, ports in targets.items()
    ]
    every = f"{interval_s}s"
    return yaml.safe_dump({
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(RULES / "*.yml")],
        "scrape_configs": jobs,
    }, sort_keys=False)  # fmt: skip


@contextmanager
def running_prometheus(config: str, folder: Path) -> Iterator[Prometheus]:
    """A real Prometheus on a free loopback port, which keeps its data in the folder; ended when the block ends.

    Raises:
        ConfigError: there is no `prometheus` on the PATH.
        DeadlineExceeded: it does not become ready.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        raise ConfigError("prometheus is not on the PATH: install it (Debian: apt-get install prometheus)")
    path = folder / "prometheus.yml"
    path.write_text(config)
    address = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([binary, *options], stdout=log, stderr=log)
    try:
        wait_until_ready(f"http://{address}/-/ready", process, folder / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


def wait_until_ready(
    url: str, process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Waits until a server of this machine answers 200. Raises DeadlineExceeded, with the end of its log, when it ends or is too late."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise DeadlineExceeded(f"{log.stem} is not ready:\n{log.read_text()[-2000:]}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m deploy.dashboards.local", description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".millrace"), help="home of the running stack")
    try:
        sys.stdout.write(local_config(require_state(parser.parse_args().home)))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
