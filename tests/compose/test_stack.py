"""The stack in containers: what is published, what the containers may do, and a job that outlives scaling and a kill."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.dashboards.survey import Prometheus, ask
from tests.compose.conftest import say
from tests.compose.stack import ROOT, ComposeStack

pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS, GROUPS = 240, 32
GROUPS_AT_ONCE = 2
"""Of one rollout server: so few that the learner waits for them, and a second server finds a core free to start on."""
OURS = ("gateway", "reward", "environment", "learner", "rollout")


def running(stack: ComposeStack) -> list[str]:
    return stack.compose("ps", "--services").split()


def test_only_the_gateway_and_grafana_are_reached_from_outside(stack: ComposeStack) -> None:
    published = {
        (service, bound["HostIp"], bound["HostPort"])
        for service in running(stack)
        for container in stack.containers(service)
        for ports in (container["NetworkSettings"]["Ports"] or {}).values()
        for bound in ports or []
    }
    grafana = ("grafana", "127.0.0.1", stack.environment["MILLRACE_GRAFANA_PORT"])
    assert published - {grafana} == {("gateway", "127.0.0.1", str(stack.port))}


def test_the_gateway_answers_to_its_token_only(stack: ComposeStack) -> None:
    url = f"http://127.0.0.1:{stack.port}/jobs"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert stack.client().jobs() == []


def test_containers_have_no_root_no_capabilities_no_writable_root_and_no_way_out(stack: ComposeStack) -> None:
    look = (
        "id -u; grep -h CapBnd /proc/1/status; grep -h NoNewPrivs /proc/1/status; touch /here 2>&1;"
        "timeout 3 getent hosts pypi.org || echo no-name"
    )
    for service in running(stack):
        if service == "grafana":
            continue
        user, capabilities, privileges, touched, name = stack.compose(
            "exec", "-T", service, "sh", "-c", look
        ).splitlines()
        assert int(user) > 0, service
        assert int(capabilities.split()[1], 16) == 0, service
        assert privileges.split()[1] == "1", service
        assert "Read-only file system" in touched, service
        if service != "gateway":  # it is on the edge
            assert name == "no-name", service


def test_a_job_trains_while_servers_come_and_go_and_a_container_dies(stack: ComposeStack) -> None:
    client, started = stack.client(), time.time()
    job = client.submit(short_demo())["id"]
    stack.wait("the job trains", lambda: client.job(job)["step"] >= 3, 240)
    say(f"{job} trains")

    stack.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", "rollout=2", "rollout")
    stack.wait("two rollout servers sample", lambda: len(samplers(client.workers())) == 2, 300)
    names = samplers(client.workers())
    say(f"two rollout servers sample at step {client.job(job)['step']}: {', '.join(sorted(names))}")

    kill(stack, "reward")
    stack.wait("reward was restarted", lambda: restarts(stack, "reward") == 1 and healthy(stack, "reward"), 120)
    say(f"reward was killed, and is back at step {client.job(job)['step']}")

    stack.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", "rollout=1", "rollout")
    stack.wait("one rollout server is left", lambda: len(samplers(client.workers())) == 1, 120)
    assert client.job(job)["state"] == "running", (
        "the job was over before the servers had come and gone: give it more steps"
    )
    say(f"one rollout server again at step {client.job(job)['step']}")

    stack.wait("the job ends", lambda: client.job(job)["state"] in {"succeeded", "failed", "cancelled"}, 600)
    check_record(client.job(job))
    time.sleep(16.0)  # three scrapes, one evaluation of the rules
    check_dashboards(stack, started)
    exported = stack.compose("exec", "-T", "learner", "ls", str(client.job(job)["export"]))
    assert "model.safetensors" in exported
    check_logs(stack)


def test_a_container_whose_processes_are_stopped_is_started_again(stack: ComposeStack) -> None:
    """Docker itself starts again only what ends: the health check ends it."""
    before, began = restarts(stack, "reward"), time.monotonic()
    stack.compose("exec", "-T", "reward", "sh", "-c", "kill -STOP -1")
    stack.wait(
        "reward was restarted", lambda: restarts(stack, "reward") == before + 1 and healthy(stack, "reward"), 120
    )
    say(f"reward was stopped by a signal, and is back after {time.monotonic() - began:.0f} s")
    assert "was stopped by a signal: killed" in stack.compose("logs", "reward")


def short_demo() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((ROOT / "deploy/config/jobs/demo.yaml").read_text())
    spec["learner"]["steps"] = STEPS
    spec["algorithm"]["filter_groups_train_batch_size"] = GROUPS
    spec["rollout"]["max_concurrent_groups"] = GROUPS_AT_ONCE
    spec["eval"] |= {"tasks": 32, "samples": 4}
    return spec


def samplers(workers: list[dict[str, Any]]) -> set[str]:
    """Rollout servers that hold weights."""
    return {worker["name"] for worker in workers if worker["kind"] == "rollout" and (worker["policy_version"] or 0) > 0}


def kill(stack: ComposeStack, service: str) -> None:
    """SIGKILL to every process in the container: its init ends, and the engine starts it again."""
    stack.compose("exec", "-T", service, "sh", "-c", "kill -9 -1", check=False)


def restarts(stack: ComposeStack, service: str) -> int:
    return int(stack.containers(service)[0]["RestartCount"])


def healthy(stack: ComposeStack, service: str) -> bool:
    return bool(stack.containers(service)[0]["State"].get("Health", {}).get("Status") == "healthy")


def check_record(record: dict[str, Any]) -> None:
    groups = dict(record["groups"])
    assert record["state"] == "succeeded", record["cause"]
    assert record["step"] == STEPS
    assert groups["trained"] == STEPS * GROUPS
    assert groups.pop("issued") == sum(groups.values()), "every group has one fate"
    say(f"succeeded: {record['groups']}")


def check_dashboards(stack: ComposeStack, started: float) -> None:
    """Every panel's and every rule's query, asked of the stack's own Prometheus."""
    prometheus = Prometheus(f"http://{stack.address('prometheus')}:9090")
    targets = prometheus.get("/api/v1/targets")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} >= {f"millrace-{service}" for service in OURS}
    down = [target["lastError"] for target in targets if target["health"] != "up"]
    assert not down, down
    answers = ask(prometheus, started, time.time())
    empty = [f"{answer.asked_by}: {answer.expr}" for answer in answers if not answer.with_data]
    assert not empty, "these queries returned nothing:\n" + "\n".join(empty)
    say(
        f"{len(answers)} queries of dashboards and rules answered with {sum(answer.with_data for answer in answers)} series"
    )


def check_logs(stack: ComposeStack) -> None:
    """No secret is in any log."""
    logs = stack.compose("logs", "--no-color")
    assert len(logs.splitlines()) > 20
    for file in stack.secrets.iterdir():
        assert file.read_text() not in logs, file.name


def test_a_model_of_ones_own_is_imported_once(stack: ComposeStack, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir(mode=0o755)
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/config.json").chmod(0o644)
    name = f"own-{stack.port}"
    words = ["run", "--rm", "-T", "-v", f"{tmp_path}/model:/from:ro", "models", "import", name]
    assert f"models: {name} imported" in stack.compose(*words)
    with pytest.raises(AssertionError, match="code 2"):
        stack.compose(*words)
    assert {name, "tiny"} <= set(stack.compose("exec", "-T", "gateway", "ls", "/var/lib/millrace/models").split())


def test_a_wrong_password_stops_the_start_with_one_clear_line(stack: ComposeStack) -> None:
    said = stack.compose(
        "run",
        "--rm",
        "--no-deps",
        "-T",
        "-e",
        "MILLRACE_REDIS_PASSWORD_FILE=/run/secrets/internal_token",
        "reward",
        check=False,
    )
    lines = [line for line in said.splitlines() if "Redis" in line]
    assert len(lines) == 1
    assert "Redis at redis:6379 refuses the user 'reward'" in lines[0]


def test_a_missing_secret_stops_the_start_by_name(built: ComposeStack) -> None:
    said = built.compose("run", "--rm", "--no-deps", "-T", "reward", check=False, MILLRACE_SECRETS="/nowhere")
    assert "/nowhere/" in said
    assert "does not exist" in said


@pytest.mark.usefixtures("built")
def test_a_redis_without_room_stops_with_one_clear_line() -> None:
    image = "millrace/redis:test"
    words = ["docker", "run", "--rm", "--read-only", "--tmpfs", "/data:size=64k,uid=10001,mode=0700", image]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["redis: the volume at /data has no room, or cannot be written"]


def test_a_taken_port_is_named(built: ComposeStack, stack: ComposeStack) -> None:
    """Another project wants the port that the stack has."""
    try:
        said = built.compose("-p", "millrace-test-2", "up", "--detach", "--no-deps", "gateway", check=False)
    finally:
        built.compose("-p", "millrace-test-2", "down", "--volumes", check=False)
    assert str(stack.port) in said
    assert "already" in said
