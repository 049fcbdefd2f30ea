"""What deploy/compose.ascend*.yaml say of NPUs, read from the files themselves; and what Docker makes of them, where it is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.docker.missing import OURS, missing
from services.common.config.settings import COLLECTIVE_TIMEOUT_S, Platform, Settings

ROOT = Path(__file__).parents[3]
MANAGERS = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
DRIVER = {
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/etc/ascend_install.info",
}
FILES = {"a2": ["deploy/compose.ascend.yaml"], "a3": ["deploy/compose.ascend.yaml", "deploy/compose.ascend-a3.yaml"]}
NPUS = {"a2": {"rollout": range(4), "learner": range(4, 8)}, "a3": {"rollout": range(8), "learner": range(8, 16)}}
IMAGES = {
    "a2": "quay.io/ascend/vllm-ascend:v0.23.0.post1",
    "a3": "quay.io/ascend/vllm-ascend:v0.23.0.post1-a3",
}


class ComposeLoader(yaml.SafeLoader):
    """YAML with Compose's own tags: what is reset is None, what overrides is itself."""


def overriding(loader: ComposeLoader, node: yaml.SequenceNode) -> list[Any]:
    """The list, as it is written."""
    return list(loader.construct_sequence(node))


ComposeLoader.add_constructor("!reset", lambda *_: None)
ComposeLoader.add_constructor("!override", overriding)


def load(file: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load((ROOT / file).read_text(), Loader=ComposeLoader)  # noqa: S506  a SafeLoader
    return document


def default(value: str) -> str:
    """The value with every `${NAME:-default}` replaced by its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


COMMON = load("deploy/compose.ascend.yaml")["services"]
VARIANTS = {name: load(files[-1])["services"] for name, files in FILES.items()}


@pytest.mark.parametrize("service", ["rollout", "learner"])
@pytest.mark.parametrize("variant", FILES)
def test_each_service_has_npus_of_its_own_and_the_managing_devices(variant: str, service: str) -> None:
    expected = [f"/dev/davinci{number}" for number in NPUS[variant][service]]
    assert VARIANTS[variant][service]["devices"] == expected + MANAGERS


@pytest.mark.parametrize("variant", FILES)
def test_rollout_and_learner_are_one_image_with_two_commands(variant: str) -> None:
    for service in ("rollout", "learner"):
        assert default(VARIANTS[variant][service]["build"]["args"]["VLLM_ASCEND_IMAGE"]) == IMAGES[variant]
        assert default(COMMON[service]["image"]) == "millrace/ascend:latest"
        assert COMMON[service]["build"]["target"] == "ascend"
        assert COMMON[service]["command"] == [f"services.{service}"]


@pytest.mark.parametrize("service", ["rollout", "learner"])
def test_the_drivers_files_are_mounted_and_cannot_be_changed_or_made_up(service: str) -> None:
    mounts = {mount["source"]: mount for mount in COMMON[service]["volumes"]}
    assert mounts.keys() >= DRIVER
    assert all(mount["read_only"] for mount in mounts.values())
    assert not any(mounts[source]["bind"]["create_host_path"] for source in DRIVER)


@pytest.mark.parametrize("service", ["rollout", "learner"])
def test_hccl_gets_the_machines_network_and_gives_up_before_the_ranks_do(service: str) -> None:
    assert COMMON[service]["network_mode"] == "host"
    environment = COMMON[service]["environment"]
    assert environment["MILLRACE_PLATFORM"] == Platform.NPU
    assert (
        120 <= int(environment["HCCL_CONNECT_TIMEOUT"]) < int(environment["HCCL_EXEC_TIMEOUT"]) < COLLECTIVE_TIMEOUT_S
    )
    assert int(environment["HCCL_EXEC_TIMEOUT"]) % 68 == 0, "older HCCL takes multiples of 68 s only"
    assert default(COMMON[service]["shm_size"]).endswith("gb")


def test_rollout_keeps_weights_in_a_format_that_can_be_loaded_again() -> None:
    assert COMMON["rollout"]["environment"]["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_nobody_but_this_machine_and_its_containers_is_listened_to_unless_told_otherwise() -> None:
    for service in ("rollout", "learner"):
        assert default(COMMON[service]["environment"]["MILLRACE_BIND_HOST"]) == "172.17.0.1"
    assert [default(port) for port in COMMON["redis"]["ports"]] == ["172.17.0.1:6379:6379"]


def test_rollout_servers_reach_the_environment_server_at_the_machines_address() -> None:
    base: dict[str, Any] = load("deploy/compose.yaml")["services"]["environment"]
    port = base["environment"]["MILLRACE_ENVIRONMENT_PORT"]
    where = default(COMMON["environment"]["environment"]["MILLRACE_ADVERTISE_HOST"])
    assert [default(each) for each in COMMON["environment"]["ports"]] == [f"{where}:{port}:{port}"]
    assert where == default(COMMON["rollout"]["environment"]["MILLRACE_ADVERTISE_HOST"])
    assert "internal" in COMMON["environment"]["networks"], "Redis and Prometheus are there"


def test_services_on_one_network_listen_on_ports_of_their_own_and_prometheus_knows_them() -> None:
    ports = {service: COMMON[service]["environment"]["MILLRACE_METRICS_PORT"] for service in ("rollout", "learner")}
    assert len(set(ports.values())) == 2
    scraped = {
        job["job_name"]: [target for each in job.get("static_configs", []) for target in each["targets"]]
        for job in load("deploy/prometheus/ascend.yml")["scrape_configs"]
    }
    for service, port in ports.items():
        assert scraped[f"millrace-{service}"] == [f"machine:{port}"]
        assert f":{port}/" in COMMON[service]["healthcheck"]["test"][-1]
        assert COMMON[service]["healthcheck"]["test"][:3] == ["CMD", "sh", "/opt/stopped.sh"]
    base = {job["job_name"] for job in load("deploy/prometheus/prometheus.yml")["scrape_configs"]}
    assert scraped.keys() == base, "dashboards and rules go by these names"


def test_every_variable_that_a_service_is_given_is_one_that_it_reads() -> None:
    fields = {f"MILLRACE_{name.upper()}" for name in Settings.model_fields}
    for service in ("rollout", "learner"):
        names = {name for name in COMMON[service]["environment"] if name.startswith("MILLRACE_")}
        assert names <= fields


def test_the_dockerfile_is_clean() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter
    file = "deploy/docker/Dockerfile.ascend"
    done = subprocess.run([linter, file], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_gets_what_it_lacks_and_keeps_what_its_engine_pins() -> None:
    """The image has all packages but some: with those, only packages that Millrace depends on are installed."""
    lock = (ROOT / "deploy/lock/ascend.txt").read_text()
    pinned = {line.partition("==")[0]: line for line in lock.splitlines()}
    assert pinned.keys() >= OURS
    assert not OURS & {"torch", "torch-npu", "transformers", "vllm", "vllm-ascend", "numpy", "fastapi"}
    lacking = {"reasoning-gym", "pyarrow", "pytest", "torch"}
    chosen = set(missing(lock, lambda name: name not in lacking))
    assert chosen == {pinned[name] for name in OURS | {"reasoning-gym", "pyarrow"}}


def test_extra_image_and_lock_name_the_same_versions() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["npu"]
    pins = dict(each.split("==") for each in extra if "==" in each)
    lock = dict(line.split("==") for line in (ROOT / "deploy/lock/ascend.txt").read_text().splitlines())
    assert {name: pins[name] for name in ("megatron-core", "mbridge")} == {
        name: lock[name] for name in ("megatron-core", "mbridge")
    }
    assert IMAGES["a2"].endswith(f":v{pins['vllm-ascend']}")
    torch = lock["torch"].removesuffix("+cpu")
    assert pins["torch_npu"].startswith(f"{torch}.post")


@pytest.mark.parametrize("variant", FILES)
def test_docker_merges_the_files_into_one_whole(variant: str) -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("docker compose is not installed; the files themselves were checked")
    files = [word for file in ["compose.yaml", *FILES[variant]] for word in ("-f", file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    done = subprocess.run(
        ["docker", "compose", *files, "config", "--format", "json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    for name, numbers in NPUS[variant].items():
        devices = [device if isinstance(device, str) else device["source"] for device in services[name]["devices"]]
        assert [device for device in devices if re.search(r"\d", device)] == [f"/dev/davinci{n}" for n in numbers]
        assert services[name]["network_mode"] == "host"
        assert not services[name].get("networks")
        assert services[name]["build"]["target"] == "ascend"
        assert services[name]["command"] == [f"services.{name}"]
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["read_only"] is True
    assert set(services["redis"]["networks"]) == {"edge", "internal"}
