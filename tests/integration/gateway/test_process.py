"""The gateway as people run it: `python -m services.gateway`."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway_process import GatewayProcess, running

PATIENCE_S = 60
ANYWHERE = "0.0.0.0"  # noqa: S104  what must be refused without a token


def start(home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a gateway that is expected to end by itself."""
    environment = {**os.environ, "MILLRACE_HOME": str(home), "MILLRACE_GATEWAY_PORT": "0", **variables}
    arguments = [sys.executable, "-m", "services.gateway"]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_it_makes_its_token_takes_a_job_and_drains_on_sigterm(
    own_process: GatewayProcess, document: dict[str, Any]
) -> None:
    assert stat.S_IMODE((own_process.home / "gateway.token").stat().st_mode) == 0o600
    assert httpx.get(f"{own_process.url}/readyz", timeout=PATIENCE_S).json() == {"status": "ok"}
    assert httpx.get(f"{own_process.url}/jobs", timeout=PATIENCE_S).status_code == 401
    answer = httpx.post(f"{own_process.url}/jobs", timeout=PATIENCE_S, json=document, headers=own_process.bearer)
    assert answer.status_code == 201, answer.text
    assert own_process.stop() == 0
    lines = [json.loads(line) for line in own_process.log.read_text().splitlines()]
    assert {line["service"] for line in lines} == {"gateway"}
    assert any("drained" in line["message"] for line in lines)


def test_a_job_whose_groups_do_not_fit_into_the_streams_is_refused_and_leaves_nothing(
    redis_url: str, home: Path, document: dict[str, Any]
) -> None:
    with (
        running(redis_url, home, MILLRACE_MAX_ENTRY_BYTES="8MiB") as process,
        httpx.Client(base_url=process.url, headers=process.bearer, timeout=PATIENCE_S) as client,
    ):
        before = client.get("/jobs").json()["total"]
        long = document | {"rollout": {"group_size": 16, "rollout_max_tokens": 32_768}}
        refused = client.post("/jobs", json=long, headers={"Idempotency-Key": "k"})
        assert refused.status_code == 422
        [message] = [
            problem["message"]
            for problem in refused.json()["error"]["fields"]
            if problem["field"] == "rollout.rollout_max_tokens"
            and "MILLRACE_MAX_ENTRY_BYTES=8388608" in problem["message"]
        ]
        assert "rollout.group_size 16 × rollout_max_tokens 32768" in message
        assert client.get("/jobs").json()["total"] == before
        assert client.post("/jobs", json=document, headers={"Idempotency-Key": "k"}).status_code == 201


def test_all_that_it_writes_is_its_users_alone(process: GatewayProcess, document: dict[str, Any]) -> None:
    assert httpx.post(f"{process.url}/jobs", timeout=PATIENCE_S, json=document, headers=process.bearer).is_success
    made = list((process.home / "jobs").rglob("*"))
    assert made
    assert [str(path) for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_an_open_event_stream_does_not_hold_up_the_drain(own_process: GatewayProcess, document: dict[str, Any]) -> None:
    job = httpx.post(f"{own_process.url}/jobs", timeout=PATIENCE_S, json=document, headers=own_process.bearer).json()
    with httpx.stream(
        "GET", f"{own_process.url}/jobs/{job['id']}/events", headers=own_process.bearer, timeout=PATIENCE_S
    ) as answer:
        next(answer.iter_lines())
        started = time.monotonic()
        assert own_process.stop() == 0
        assert time.monotonic() - started < 10


def test_a_body_over_the_limit_is_refused_over_a_real_socket_and_the_client_sees_why(process: GatewayProcess) -> None:
    headers = {**process.bearer, "Content-Type": "application/json"}
    announced = httpx.post(f"{process.url}/jobs", timeout=PATIENCE_S, content=b" " * 5_000_000, headers=headers)
    assert (announced.status_code, announced.json()["error"]["code"]) == (413, "body_too_large")
    streamed = httpx.post(
        f"{process.url}/jobs", timeout=PATIENCE_S, content=(b" " * 65_536 for _ in range(80)), headers=headers
    )
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (413, "body_too_large")


def test_no_log_and_no_answer_holds_a_secret(redis_url: str, home: Path) -> None:
    canary = "canary-" + "0123456789abcdef" * 2
    with running(redis_url, home, MILLRACE_TOKEN=canary, MILLRACE_LOG_LEVEL="DEBUG") as process:
        paths = ("/jobs", "/workers", "/metrics", "/openapi.json", f"/x?token={canary}", f"/jobs/{canary}")
        tokens: tuple[dict[str, str], ...] = (
            {},
            {"Authorization": f"Bearer {canary}"},
            {"Authorization": f"Bearer {canary}x"},
        )
        said = [
            httpx.get(f"{process.url}{path}", timeout=PATIENCE_S, headers=token).text
            for path in paths
            for token in tokens
        ]
        httpx.post(
            f"{process.url}/jobs", timeout=PATIENCE_S, json={"token": 1}, headers={"Authorization": f"Bearer {canary}"}
        )
        assert process.stop() == 0
    assert not [text for text in said if canary in text]
    assert canary not in process.log.read_text()
    assert not (home / "gateway.token").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MILLRACE_BIND_HOST": ANYWHERE}, "set MILLRACE_TOKEN"),
        ({"MILLRACE_BIND_HOST": ANYWHERE, "MILLRACE_TOKEN": "short"}, "MILLRACE_TOKEN has 5 characters"),
        ({"MILLRACE_TOKEN": ""}, "MILLRACE_TOKEN is empty"),
        ({"MILLRACE_BIND_HOST": "203.0.113.7", "MILLRACE_TOKEN": "x" * 40}, "MILLRACE_BIND_HOST=203.0.113.7"),
        ({"MILLRACE_GATEWAY_PORT": "eighty"}, "MILLRACE_GATEWAY_PORT"),
        ({"MILLRACE_TOKEN_FILE": "/nonexistent/token"}, "/nonexistent/token"),
    ],
)
def test_a_wrong_setting_ends_it_with_one_clear_line(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    done = start(tmp_path / "home", **variables)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start(tmp_path, MILLRACE_GATEWAY_PORT=str(port))
    assert done.returncode == 2
    assert f"MILLRACE_GATEWAY_PORT={port}: Address already in use" in done.stderr


@pytest.mark.slow
def test_sigint_drains_as_well(own_process: GatewayProcess) -> None:
    own_process.popen.send_signal(signal.SIGINT)
    assert own_process.popen.wait(20) == 0
