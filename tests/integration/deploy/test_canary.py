"""No secret leaves its place: real services, each secret a canary, and everything that they say and keep searched for them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from services.cli.stack.children import free_port
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.streams.stream import add
from tests.integration.deploy.conftest import USERS, Connect, password

TOKEN = "canary-token-of-the-gateway-0123456789"  # noqa: S105  what is looked for
INTERNAL = "canary-token-of-the-inside-0123456789"
TRACKERS = "canary-key-of-trackers-0123456789abcdef"
WRONG = "canary-token-of-a-stranger-0123456789"
JUDGE = "canary-key-of-a-judge-0123456789"
TRACKER_KEYS = ("MILLRACE_MLFLOW_TOKEN", "MILLRACE_WANDB_API_KEY", "MILLRACE_SWANLAB_API_KEY")
PATIENCE_S = 90.0
"""The first job waits until its gateway has imported what its checks need, while three other services start and other tests run."""
SPEC = {"name": "demo", "model": {"path": "missing"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}


@dataclass(frozen=True, slots=True)
class Stack:
    """The five services, each a process with debug logs."""

    gateway: str
    metrics: tuple[str, ...]
    logs: Path


@contextmanager
def process(service: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-m", f"services.{service}"], env=environment, stdout=out, stderr=out)
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(20)
        finally:
            child.kill()
            child.wait()


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            try:
                if (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)


@pytest.fixture
async def stack(guarded_port: int, connect_as: Connect, secrets_dir: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    assert await connect_as("tester").ping()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "internal").write_text(INTERNAL)
    (tmp_path / "judge").write_text(JUDGE)
    judges = {"far": {"url": "http://127.0.0.1:1/v1", "model": "m", "key_file": str(tmp_path / "judge")}}
    urls = {}
    with ExitStack() as services:
        for service in USERS:
            port = free_port()
            urls[service] = f"http://127.0.0.1:{port}"
            environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")} | {
                "REDIS_URL": f"redis://{service}@127.0.0.1:{guarded_port}/0",
                "MILLRACE_REDIS_PASSWORD_FILE": str(secrets_dir / f"redis_{service}_password"),
                "MILLRACE_TOKEN_FILE": str(tmp_path / "token"),
                "MILLRACE_INTERNAL_TOKEN_FILE": str(tmp_path / "internal"),
                "MILLRACE_JUDGE_ENDPOINTS": json.dumps(judges),
                **{name: TRACKERS for name in TRACKER_KEYS if service == "gateway"},
                "MILLRACE_HOME": str(tmp_path / "home"),
                "MILLRACE_LOG_LEVEL": "DEBUG",
                "MILLRACE_GATEWAY_PORT" if service == "gateway" else "MILLRACE_METRICS_PORT": str(port),
                "MILLRACE_WORKER": "learner" if service == "learner" else f"{service}-0",
            }
            services.enter_context(process(service, environment, tmp_path / f"{service}.log"))
        for url in urls.values():
            await until_ready(url)
        yield Stack(urls["gateway"], tuple(urls[name] for name in USERS), tmp_path)


async def everything_in(redis: Redis) -> bytes:
    """Every key and value of the server."""
    said = []
    async for key in redis.scan_iter():
        said += [key, await redis.dump(key) or b""]
        if await redis.type(key) == b"stream":
            said.append(repr(await redis.xrange(key)).encode())
    return b"\n".join(said)


async def asked(stack: Stack) -> str:
    """What the gateway answers on every path, with the right token, a wrong one, and the token where it does not belong."""
    said = []
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=PATIENCE_S) as client:
        right, wrong = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": f"Bearer {WRONG}"}
        paths = list((await client.get("/openapi.json")).json()["paths"])
        for path in ["/", "/console/", "/metrics", *paths]:
            concrete = re.sub(r"\{[^}]*\}", "demo-1", path)
            for headers in (right, wrong, {}):
                if path.endswith("/events"):
                    continue  # a stream without an end; its entries are searched in Redis
                for method in ("GET", "POST"):
                    document = SPEC if method == "POST" else None
                    try:
                        answer = await client.request(method, concrete, headers=headers, json=document)
                    except httpx.TimeoutException:
                        log = (stack.logs / "gateway.log").read_text()
                        pytest.fail(f"{method} {concrete} was not answered within {PATIENCE_S:.0f} s:\n{log[-4000:]}")
                    said.append(f"{answer.headers} {answer.text}")
        said += [(await client.get(f"{url}/metrics", headers=right)).text for url in stack.metrics]
    return "\n".join(said)


@pytest.mark.timeout(240)
async def test_no_secret_is_in_any_answer_log_metric_or_redis(stack: Stack, connect_as: Connect) -> None:
    tester = connect_as("tester")
    said = await asked(stack)
    await tester.hset(keys.ACTIVE, "broken", "not a job")  # what a service cannot read it complains about
    await add(tester, "demo-1", Stage.TASKS, "train:0:1", b"not a task")
    await asyncio.sleep(3)
    logs = {path.name: path.read_text() for path in sorted(stack.logs.glob("*.log"))}
    kept = await everything_in(tester)
    secrets = [TOKEN, INTERNAL, TRACKERS, WRONG, JUDGE, *map(password, USERS)]
    assert len(logs) == len(USERS)
    assert "refused" in said or "missing" in said, "the requests did reach the checks"
    for secret in secrets:
        assert secret not in said
        assert secret.encode() not in kept
        for name, text in logs.items():
            assert secret not in text, name
