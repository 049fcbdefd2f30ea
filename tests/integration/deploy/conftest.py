"""A real Redis with the users of deploy/redis, as the container has them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from services.cli.stack.children import free_port
from services.common.redis.connection import connect
from tests.conftest import server_binaries

DEPLOY = Path(__file__).parents[3] / "deploy"
USERS = ("gateway", "rollout", "reward", "environment", "learner")
Connect = Callable[..., Redis]


def password(user: str) -> str:
    return f"canary-password-of-{user}"


@pytest.fixture(scope="session")
def secrets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("secrets")
    for user in USERS:
        (folder / f"redis_{user}_password").write_text(password(user))
    return folder


@pytest.fixture(scope="session", params=["embedded", "system"])
def guarded_port(
    request: pytest.FixtureRequest, secrets_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """Port of a server whose only users are the services'; the tests' own user `tester` may do everything."""
    binaries = server_binaries()
    if request.param == "system" and len(binaries) == 1:
        pytest.skip("redis-server is not installed; the embedded server was tested")
    folder: Path = tmp_path_factory.mktemp("guarded")
    acl = render(secrets_dir)
    (folder / "users.acl").write_text(f"{acl}user tester on >tester ~* &* +@all\n")
    port = free_port()
    changed = {"port": port, "bind": "127.0.0.1", "dir": folder, "aclfile": folder / "users.acl"}
    lines = (DEPLOY / "redis/redis.conf").read_text().splitlines()
    kept = [line for line in lines if line.partition(" ")[0] not in changed]
    (folder / "redis.conf").write_text("\n".join(kept + [f"{name} {value}" for name, value in changed.items()]))
    binary = binaries[0] if request.param == "embedded" else binaries[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, str(folder / "redis.conf")], stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def render(secrets: Path) -> str:
    command = ["sh", str(DEPLOY / "redis/users.sh"), str(DEPLOY / "redis/users.acl"), str(secrets)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
async def connect_as(guarded_port: int) -> Connect:
    """A client of a user, with an empty server behind it."""

    def connected(user: str, *, block_s: float = 0.0) -> Redis:
        secret = "tester" if user == "tester" else password(user)
        return connect(f"redis://{user}@127.0.0.1:{guarded_port}/0", password=SecretStr(secret), block_s=block_s)

    await connected("tester").flushall()  # retried until the server is up
    return connected
