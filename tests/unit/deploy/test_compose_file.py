"""What deploy/compose.yaml promises of every container, read from the file itself; and what Docker makes of it, where it is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
LASTING = {name: service for name, service in SERVICES.items() if "profiles" not in service}
OURS = {"gateway", "reward", "environment", "learner", "rollout"}


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)s", text)
    assert found, text
    return float(found[1])


def default(text: str) -> str:
    """The text with every `${NAME:-value}` replaced by its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_up_brings_the_eight_services() -> None:
    assert set(LASTING) == OURS | {"redis", "prometheus", "grafana"}


def test_only_the_gateway_and_grafana_are_published_and_on_loopback() -> None:
    ports = {
        name: [default(port) for port in service["ports"]] for name, service in SERVICES.items() if "ports" in service
    }
    assert ports == {"gateway": ["127.0.0.1:8080:8080"], "grafana": ["127.0.0.1:3000:3000"]}


def test_only_the_published_services_are_on_the_edge_and_the_rest_has_no_way_out() -> None:
    assert DOCUMENT["networks"]["internal"] == {"internal": True}
    on_edge = {name for name, service in SERVICES.items() if "edge" in service.get("networks", [])}
    assert on_edge == {name for name, service in SERVICES.items() if "ports" in service}
    assert all("internal" in service["networks"] for service in LASTING.values())
    assert not any("network_mode" in service for service in LASTING.values())


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_runs_without_rights(name: str) -> None:
    service = SERVICES[name]
    assert int(service["user"].partition(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])  # noqa: S108


@pytest.mark.parametrize("name", LASTING)
def test_every_service_is_watched_restarted_and_given_time_to_drain(name: str) -> None:
    service = LASTING[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["options"].keys() >= {"max-size", "max-file"}
    drain = float(service["environment"]["MILLRACE_DRAIN_TIMEOUT_S"]) if name in OURS else 0.0
    # The learner drains its ranks, and then its own loops, which have ten seconds more.
    assert seconds(service["stop_grace_period"]) > 2 * drain + 10


@pytest.mark.parametrize("name", sorted(OURS | {"redis"}))
def test_what_a_signal_stops_in_a_container_is_ended_by_its_health_check(name: str) -> None:
    assert LASTING[name]["healthcheck"]["test"][:3] == ["CMD", "sh", "/opt/stopped.sh"]
    assert LASTING[name]["init"] is True, "only then does the container end with its service"


def test_services_start_after_what_they_need() -> None:
    for name in OURS:
        assert LASTING[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert LASTING["prometheus"]["depends_on"] == {"gateway": {"condition": "service_healthy"}}
    assert LASTING["grafana"]["depends_on"] == {"prometheus": {"condition": "service_healthy"}}


def test_no_secret_is_in_the_environment_and_each_service_mounts_only_its_own() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("TOKEN(?!S)|PASSWORD|SECRET", variable):
                assert variable.endswith("FILE")
                assert str(value).removeprefix("/run/secrets/") in service["secrets"], (name, variable)
        assert ":" not in service.get("environment", {}).get("REDIS_URL", "").removeprefix("redis://").partition("@")[0]
    for user in OURS:
        holders = {name for name, service in LASTING.items() if f"redis_{user}_password" in service.get("secrets", [])}
        assert holders == {user, "redis"}


def test_every_secret_is_one_that_the_script_makes() -> None:
    script = (ROOT / "deploy/secrets.sh").read_text()
    made = re.search(r"^for name in (.*); do$", script, re.MULTILINE)
    assert made
    from_files = {name for name, secret in DOCUMENT["secrets"].items() if "SECRETS" in secret["file"]}
    assert from_files == set(made[1].split())
    assert set(DOCUMENT["secrets"]) - from_files == {"pip_conf", "hf_token", "modelscope_token"}


def test_what_must_survive_lies_in_named_volumes_that_only_their_services_write() -> None:
    assert set(DOCUMENT["volumes"]) == {"redis", "jobs", "models", "data", "hubs", "prometheus", "grafana"}
    writers: dict[str, set[str]] = {volume: set() for volume in DOCUMENT["volumes"]}
    for name, service in LASTING.items():
        for mount in service.get("volumes", []):
            volume, _, options = default(mount).partition(":")
            if volume in writers and not options.endswith(":ro"):
                writers[volume].add(name)
    assert writers == {
        "redis": {"redis"}, "jobs": {"gateway", "learner"}, "prometheus": {"prometheus"}, "grafana": {"grafana"},
        "models": set(), "data": set(), "hubs": {"gateway"},
    }  # fmt: skip


def test_redis_writes_everything_down_and_evicts_nothing() -> None:
    lines = (ROOT / "deploy/redis/redis.conf").read_text().splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert settings["appendonly"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["dir"] == "/data"
    assert settings["aclfile"]


def test_every_image_is_pinned() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text()
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    names = [*bases, default(LASTING["grafana"]["image"])]
    assert len(bases) == 3
    for name in names:
        assert re.search(r":[\w.-]*\d[\w.-]*$", name), name
    for line in re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE):
        assert line.startswith("${") or line in re.findall(r" AS (\S+)$", dockerfile, re.MULTILINE)


def test_the_committed_files_name_no_host_but_pytorchs() -> None:
    files = [
        "deploy/compose.yaml",
        "deploy/docker/Dockerfile",
        "deploy/docker/healthy.py",
        "deploy/docker/models.sh",
        "deploy/docker/stopped.sh",
        "deploy/secrets.sh",
    ]
    texts = [(ROOT / file).read_text() for file in files]
    hosts = {host for text in texts for host in re.findall(r"https?://([^/\s\"':]+)", text)}
    assert hosts <= {"download.pytorch.org", "127.0.0.1"}


def test_secrets_stay_out_of_the_build_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert not any(".millrace" in rule or rule == "!deploy" for rule in rules)


def test_the_reward_service_leaves_the_internal_network_only_with_the_file_for_judges() -> None:
    overlay: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.judges.yaml").read_text())
    assert SERVICES["reward"]["networks"] == ["internal"]
    assert overlay["services"] == {"reward": {"networks": ["edge", "internal"], "secrets": ["judge_key"]}}
    passed_on = {
        name for name, service in LASTING.items() if "MILLRACE_JUDGE_ENDPOINTS" in service.get("environment", {})
    }
    assert passed_on >= {"gateway", "reward"}


def test_the_environment_service_leaves_the_internal_network_only_with_the_file_for_it() -> None:
    overlay: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.environments.yaml").read_text())
    assert SERVICES["environment"]["networks"] == ["internal"]
    assert overlay["services"] == {"environment": {"networks": ["edge", "internal"]}}


@pytest.mark.parametrize(
    "file", ["compose.yaml", "deploy/compose.yaml", "deploy/compose.judges.yaml", "deploy/compose.environments.yaml"]
)
def test_the_files_follow_the_compose_specification(file: str) -> None:
    checker = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    assert checker
    done = subprocess.run(
        [checker, "--builtin-schema", "vendor.compose-spec", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_clean() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert linter
    done = subprocess.run([linter, "deploy/docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_docker_understands_the_files() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("docker compose is not installed; the files were checked against the specification's schema")
    done = subprocess.run(["docker", "compose", "config", "-q"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_gateway_answers_to_the_name_that_prometheus_asks_it_by() -> None:
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (target,) = next(job for job in scrapes if job["job_name"] == "millrace-gateway")["static_configs"][0]["targets"]
    assert target.partition(":")[0] == SERVICES["gateway"]["hostname"]
    assert default(SERVICES["gateway"]["environment"]["MILLRACE_GATEWAY_HOSTS"]) == "[]"
