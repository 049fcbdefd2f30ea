"""Prometheus' own tools accept configuration and rules, and each alert fires on its trouble only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.dashboards.local import local_config
from deploy.dashboards.survey import DEPLOY, RULES, rules
from services.common.redis.keys import Stage
from services.common.service.heartbeat import WorkerKind
from services.common.service.stack_state import ProcessState, UpState

HERE = Path(__file__).parent
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def run_promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@promtool
def test_promtool_accepts_the_configuration_and_finds_its_rules(tmp_path: Path) -> None:
    run_promtool("check", "config", "--syntax-only", CONFIG)
    token = tmp_path / "token"
    token.write_text("t")
    shutil.copytree(RULES, tmp_path / "rules")
    text = CONFIG.read_text()
    assert text.count("/run/secrets/gateway_token") == 1
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/gateway_token", str(token)))
    assert f"{len(rules())} rules found" in run_promtool("check", "config", tmp_path / "prometheus.yml")


@promtool
def test_each_alert_fires_on_its_trouble_and_on_nothing_else(tmp_path: Path) -> None:
    cases = (HERE / "alerts.yml").read_text()
    assert all(f'alertname="{rule.name}"' in cases for rule in rules()), "an alert without a test"
    assert all(f"alertname: {rule.name}}}" in cases for rule in rules()), "an alert not tested to be silent"
    path = tmp_path / "alerts.yml"
    path.write_text(cases.replace("RULES", str(RULES / "*.yml")))
    assert "SUCCESS" in run_promtool("test", "rules", path)


@promtool
def test_promtool_accepts_the_configuration_of_a_local_stack(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(local_config(stack()))
    assert f"{len(rules())} rules found" in run_promtool("check", "config", path)


def test_a_local_stack_is_scraped_service_by_service() -> None:
    jobs = yaml.safe_load(local_config(stack()))["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets == {
        "millrace-gateway": ["127.0.0.1:8080"],
        "millrace-rollout": ["127.0.0.1:9001", "127.0.0.1:9002"],
    }


def test_compose_and_local_name_their_jobs_alike() -> None:
    jobs = [job["job_name"] for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]]
    assert jobs == ["millrace-gateway", *(f"millrace-{kind}" for kind in WorkerKind), "prometheus"]


def test_every_rule_has_a_severity_and_says_what_to_do() -> None:
    page = (DEPLOY.parent / "docs" / "dashboards.md").read_text()
    for path in RULES.glob("*.yml"):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                assert rule["labels"]["severity"] in {"warning", "critical"}
                assert rule["annotations"].keys() == {"summary", "description"}
                assert rule["alert"] in page, f"docs/dashboards.md does not explain {rule['alert']}"


def test_the_dead_letters_alert_names_a_stream_that_exists() -> None:
    from services.common.redis import keys

    text = "".join(path.read_text() for path in RULES.glob("*.yml"))
    pattern = keys.dead("JOB", Stage.TASKS).replace("JOB", "<job>").replace("tasks", "{{ $labels.stage }}")
    assert pattern in text


def stack() -> UpState:
    def process(port: int | None) -> ProcessState:
        return ProcessState(1, 0.0, port, True, 0)

    processes = {
        "redis": process(None),
        "gateway": process(8080),
        "rollout-0": process(9001),
        "rollout-1": process(9002),
    }
    return UpState(1, 0.0, "http://127.0.0.1:8080", "redis://127.0.0.1:1/0", None, True, processes)
