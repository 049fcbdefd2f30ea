"""The embedded server: durable, closed to other users of the machine, and gone with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from services.cli.checks.servers import redact_url
from services.cli.stack.children import start_child
from services.cli.stack.health import Prober
from services.cli.stack.plan import _plan_redis
from services.cli.stack.redis import server_binary
from services.cli.stack.runtime import Runtime
from services.common.config.private_folder import make_private
from services.common.errors import ConfigError, DeadlineExceeded
from services.common.service.process_tree import is_running
from tests.chaos.proxy import server_of
from tests.own_redis import OwnRedis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnRedis]:
    server = OwnRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def test_it_listens_on_no_port_has_every_write_in_a_file_and_never_evicts(server: OwnRedis) -> None:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        wanted = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "port": "0"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_keeps_address_and_data(server: OwnRedis, number: signal.Signals) -> None:
    url, pid = server.url, server.pid
    with redis.Redis.from_url(url) as client:
        client.xadd("s", {"d": b"1"})
    psutil.Process(pid).send_signal(number)
    server.stop()
    server.start()
    assert server.url == url
    assert server.pid != pid
    with redis.Redis.from_url(url) as client:
        assert client.xlen("s") == 1


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user may enter; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user for a while")
def test_another_user_of_the_machine_reaches_neither_the_server_nor_its_files(open_folder: Path) -> None:
    (open_folder / "home/redis").mkdir(parents=True, mode=0o755)  # by an earlier release, or a person
    server = OwnRedis(open_folder / "home/redis")
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("millrace:jobs", "x")
        assert [seen for seen in listening(server) if seen != str(server.socket)] == []
        assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(str(server.socket))) == "PermissionError"
        assert as_nobody(lambda: list(server.folder.iterdir())) == "PermissionError"
        for path in server.folder.rglob("*"):
            assert as_nobody(path.stat) == "PermissionError"
    finally:
        server.stop()


def listening(server: OwnRedis) -> list[str]:
    """Where the server can be connected to, the names of its Unix sockets included (an abstract one has no directory to guard it)."""
    connections = psutil.Process(server.pid).net_connections(kind="all")
    return [str(one.laddr) for one in connections if one.status in {psutil.CONN_LISTEN, psutil.CONN_NONE} and one.laddr]


def as_nobody(attempt: Callable[[], object]) -> str:
    """What came of it when another user tried: the error's type, or `done`."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            attempt()
            os.write(theirs, b"done")
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what came of it
            os.write(theirs, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours, "rb") as said:
        return said.read().decode()


def test_a_home_with_a_long_path_has_its_socket_in_the_spare_directory(tmp_path: Path) -> None:
    long = tmp_path / ("home " * 20) / "redis"
    spare = tmp_path / "s"
    spare.mkdir(mode=0o700)
    server = OwnRedis(long, spare=spare)
    server.start()
    try:
        assert server.socket == spare / "redis.sock"
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
    finally:
        server.stop()
    with pytest.raises(ConfigError, match="longer than"):
        OwnRedis(long)


@pytest.mark.parametrize("name", ["with a space", "100%", "a?b#c", "größe", "'quoted\""])
def test_the_url_names_the_socket_whatever_the_home_is_called(tmp_path: Path, name: str) -> None:
    server = OwnRedis(tmp_path / name)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        assert server_of(server.url) == server.socket
        assert redact_url(server.url) == f"unix://{server.socket}"
    finally:
        server.stop()


def test_a_folder_of_another_user_or_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    make_private(tmp_path / "real")
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="not a directory of this user"):
        make_private(tmp_path / "link")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.own_redis import OwnRedis\n"
        "server = OwnRedis(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_running(pid):
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
    _, (spec,) = _plan_redis(tmp_path, Runtime(tmp_path, None), 5.0)
    process = start_child(spec.argv, log_path=tmp_path / "log")
    try:
        prober, deadline = Prober(process.pid, spec.ready, 0.05), time.monotonic() + 20
        while prober.complaint is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        prober.stop()
        assert spec.healthy(process.pid) is None
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="no answer on /"):
            spec.healthy(process.pid)
    finally:
        process.kill()
        process.wait()
