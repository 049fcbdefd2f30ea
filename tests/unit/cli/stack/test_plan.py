"""The table of processes that `millrace up` runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from services.cli.stack import plan as module
from services.cli.stack.plan import Stack, plan_stack
from services.cli.stack.runtime import Runtime
from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.common.sandbox.processes import HUB_TOKENS


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLRACE_TOKEN", "MILLRACE_TOKEN_FILE", "VLLM_CPU_OMP_THREADS_BIND", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "available_cores", lambda: [0, 1, 2, 3])


def planned(
    home: Path, servers: int = 2, metrics_base: int | None = None, environment_python: Path | None = None
) -> Stack:
    settings, runtime = Settings(home=home, environment_python=environment_python), Runtime(home / "tmp", home / "shm")
    return plan_stack(settings, runtime, servers=servers, gateway_port=0, metrics_base=metrics_base)


def test_there_is_one_process_of_each_and_as_many_rollout_servers_as_asked(tmp_path: Path) -> None:
    table = {spec.name: spec for spec in planned(tmp_path).table}
    assert list(table) == ["redis", "gateway", "reward-0", "environment-0", "learner-0", "rollout-0", "rollout-1"]
    assert table["rollout-1"].argv[-1] == "services.rollout"
    assert table["redis"].stage > table["gateway"].stage > table["learner-0"].stage


def test_each_process_knows_its_name_home_redis_and_port(tmp_path: Path) -> None:
    stack = planned(tmp_path)
    ports = list[int]()
    for spec in stack.table[1:]:
        assert spec.env["MILLRACE_WORKER"] == spec.name
        assert spec.env["MILLRACE_HOME"] == str(tmp_path)
        assert spec.env["REDIS_URL"] == stack.redis_url
        assert spec.env["HF_HUB_OFFLINE"] == "1"
        assert spec.env["MILLRACE_GATEWAY_PORT" if spec.name == "gateway" else "MILLRACE_METRICS_PORT"] == str(
            spec.port
        )
        ports.append(spec.port or 0)
    assert len(set(ports)) == 6
    assert max(ports) < 32_768, "no connection takes one of them before the service has started"


def test_learner_and_rollout_servers_compute_on_separate_cores(tmp_path: Path) -> None:
    table = {spec.name: spec for spec in planned(tmp_path).table}
    assert table["learner-0"].cores == {2, 3}
    assert table["learner-0"].env["MILLRACE_STACK_CORES"] == "0,1,2,3"
    assert table["gateway"].env["MILLRACE_LEARNER_CORES"] == "2"
    assert table["rollout-0"].env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert table["rollout-1"].env["VLLM_CPU_OMP_THREADS_BIND"] == "1"


def test_a_redis_that_is_given_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379/3")
    stack = planned(tmp_path)
    assert stack.redis_url == "redis://elsewhere:6379/3"
    assert "redis" not in [spec.name for spec in stack.table]


def test_only_the_gateway_is_given_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "t" * 40)
    stack = planned(tmp_path)
    assert stack.token_file is None
    assert [spec.name for spec in stack.table if "t" * 40 in spec.env.values()] == ["gateway"]


def test_only_the_gateway_is_given_the_trackers_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "MILLRACE_WANDB_API_KEY",
        "MILLRACE_SWANLAB_API_KEY",
        "MILLRACE_MLFLOW_TOKEN",
        "MILLRACE_MLFLOW_PASSWORD",
    )
    for name in names:
        monkeypatch.setenv(name, "k" * 40)
    assert [spec.name for spec in planned(tmp_path).table if "k" * 40 in spec.env.values()] == ["gateway"]


def test_only_the_gateway_is_given_the_hubs_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HUB_TOKENS:
        monkeypatch.setenv(name, "secret")
    table = planned(tmp_path).table
    assert [spec.name for spec in table if set(HUB_TOKENS) & spec.env.keys()] == ["gateway"]


def test_the_services_share_an_internal_token_that_only_this_user_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_INTERNAL_TOKEN", raising=False)
    tokens = set()
    for _ in range(2):
        files = {spec.env["MILLRACE_INTERNAL_TOKEN_FILE"] for spec in planned(tmp_path).table[1:]}
        assert files == {str(tmp_path / "internal.token")}
        assert (tmp_path / "internal.token").stat().st_mode & 0o777 == 0o600
        tokens.add((tmp_path / "internal.token").read_text())
    assert len(tokens) == 2
    monkeypatch.setenv("MILLRACE_INTERNAL_TOKEN", "mine")
    assert all(spec.env.get("MILLRACE_INTERNAL_TOKEN") == "mine" for spec in planned(tmp_path).table[1:])


def test_each_process_has_a_tmpdir_of_its_own_and_stages_in_the_homes_own_directory(tmp_path: Path) -> None:
    specs = planned(tmp_path).table[1:]
    assert [spec.env["TMPDIR"] for spec in specs] == [str(tmp_path / "tmp" / spec.name) for spec in specs]
    assert all(str(spec.temporary) == spec.env["TMPDIR"] for spec in specs)
    assert {spec.env["MILLRACE_SHARED_MEMORY"] for spec in specs} == {str(tmp_path / "shm")}


def test_redis_is_reached_by_a_socket_and_listens_on_no_port(tmp_path: Path) -> None:
    stack = planned(tmp_path)
    assert stack.redis_url == f"unix://{tmp_path}/redis/redis.sock"
    argv = list(stack.table[0].argv)
    assert argv[argv.index("--port") + 1] == "0"


def test_without_a_token_the_gateways_own_file_is_named(tmp_path: Path) -> None:
    assert planned(tmp_path).token_file == str(tmp_path / "gateway.token")


def test_given_metrics_ports_count_up(tmp_path: Path) -> None:
    # Below those that the kernel gives to other tests, of which one could take a port meanwhile.
    base = 20_000 + os.getpid() % 10_000
    table = planned(tmp_path, 1, base).table
    assert [spec.port for spec in table[2:]] == [base, base + 1, base + 2, base + 3]


def test_the_environment_service_alone_may_have_a_python_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)  # as in a virtual environment: what it links to has other packages
    table = planned(tmp_path, environment_python=own).table
    started = {spec.name: spec.argv[0] for spec in table if spec.name != "redis"}
    assert started.pop("environment-0") == str(own)
    assert set(started.values()) == {sys.executable}


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MILLRACE_ENVIRONMENT_PYTHON: there is no program .*/nowhere"):
        planned(tmp_path, environment_python=tmp_path / "nowhere")
