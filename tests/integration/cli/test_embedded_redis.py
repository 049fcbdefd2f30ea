"""The embedded server: durable, alone on its port, and gone with its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from services.cli.children import start_child
from services.cli.embedded_redis import EmbeddedRedis, server_binary
from services.cli.stack import _plan_redis
from services.common.errors import ConfigError, DeadlineExceeded


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def test_it_answers_on_loopback_with_every_write_in_a_file_and_never_evicts(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "bind": "127.0.0.1"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_keeps_port_and_data(server: EmbeddedRedis, number: signal.Signals) -> None:
    url, pid = server.url, server.pid
    assert pid is not None
    with redis.Redis.from_url(url) as client:
        client.xadd("s", {"d": b"1"})
    psutil.Process(pid).send_signal(number)
    server.stop()
    server.start()
    assert server.url == url
    assert server.pid != pid
    with redis.Redis.from_url(url) as client:
        assert client.xlen("s") == 1


def test_stopping_twice_is_harmless(server: EmbeddedRedis) -> None:
    server.stop()
    server.stop()
    assert server.pid is None


def test_a_port_that_another_server_has_is_refused(server: EmbeddedRedis, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ended at once .*see .*redis\.log"):
        EmbeddedRedis(tmp_path / "other", port=server.port).start()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from services.cli.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"server {pid} outlived its parent"
        time.sleep(0.05)


def test_the_binary_is_an_executable_file() -> None:
    done = subprocess.run([str(server_binary()), "--version"], capture_output=True, text=True, check=True)
    assert "v=" in done.stdout


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"millrace\[redis\].*REDIS_URL"):
        server_binary()


def test_a_stopped_server_gives_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    _, (spec,) = _plan_redis(tmp_path, 5.0)
    process = start_child(spec.argv, log_path=tmp_path / "log")
    try:
        deadline = time.monotonic() + 20
        while spec.ready(process.pid) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert spec.healthy(process.pid) is None
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="no answer on port"):
            spec.healthy(process.pid)
    finally:
        process.kill()
        process.wait()
