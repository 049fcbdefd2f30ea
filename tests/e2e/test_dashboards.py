"""A real stack, a real Prometheus, a short job: every panel and every rule has something to show."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.dashboards.local import local_config, running_prometheus
from deploy.dashboards.preview import draw_all
from deploy.dashboards.survey import Answer, Prometheus, ask, legend_labels, panels, rules
from services.common.service.stack_state import read_state
from tests.e2e.conftest import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the fixture also makes the model and starts the stack
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]

SCRAPE_S = 2
STEPS = 10


def short_job(spec: dict[str, Any]) -> dict[str, Any]:
    spec["learner"]["steps"] = STEPS
    spec["algorithm"]["filter_groups_train_batch_size"] = 16
    spec["checkpoint"]["interval_steps"] = 5
    spec["eval"] |= {"tasks": 16, "samples": 4}
    return spec


def test_every_panel_and_every_rule_has_data_in_a_live_run(
    stack: Stack, demo_spec: dict[str, Any], tmp_path: Path
) -> None:
    state = read_state(stack.home)
    assert state is not None
    with running_prometheus(local_config(state, interval_s=SCRAPE_S), tmp_path) as prometheus:
        started = time.time()
        job_id = stack.client.submit(short_job(demo_spec))["id"]
        stack.wait(job_id, until=lambda record: record["state"] == "succeeded", timeout_s=240)
        time.sleep(3 * SCRAPE_S)
        ended = time.time()

        check_targets(prometheus)
        answers = ask(prometheus, started, ended)
        check_answers(answers)
        check_counts(prometheus, started, ended, stack.client.job(job_id))
        pictures = draw_all(prometheus, started, ended, tmp_path)
        assert all(path.stat().st_size > 20_000 for path in pictures)


def check_targets(prometheus: Prometheus) -> None:
    targets = prometheus.get("/api/v1/targets")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == {
        f"millrace-{service}" for service in ("gateway", "rollout", "reward", "environment", "learner")
    }
    assert all(target["health"] == "up" for target in targets), targets
    for target in targets:
        lint(httpx.get(target["scrapeUrl"], trust_env=False).text)
    loaded = prometheus.get("/api/v1/rules")["groups"]
    assert {rule["name"] for group in loaded for rule in group["rules"]} == {rule.name for rule in rules()}


def lint(metrics: str) -> None:
    """promtool's opinion of the names, units and help texts."""
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if line.startswith("millrace_")]
    assert not complaints, complaints


def check_answers(answers: list[Answer]) -> None:
    assert len(answers) >= sum(len(panel.targets) for panel in panels()) + len(rules())
    empty = [f"{answer.asked_by}: {answer.expr}" for answer in answers if not answer.with_data]
    assert not empty, "these queries returned nothing:\n" + "\n".join(empty)
    for answer in answers:
        for series in answer.series:
            assert legend_labels(answer.legend) <= series.labels.keys(), f"{answer.asked_by}: {answer.legend}"


def check_counts(prometheus: Prometheus, started: float, ended: float, record: dict[str, Any]) -> None:
    """What Prometheus gathered is what the job's record says."""

    def newest(expr: str) -> dict[str, float]:
        series = prometheus.over(expr, started, ended, 1.0)
        return {",".join(s.labels.values()): s.points[-1][1] for s in series}

    assert newest("sum(millrace_learner_steps_total)") == {"": STEPS}
    assert newest("sum(millrace_learner_policy_version)") == {"": STEPS}
    assert newest('max by (state) (millrace_gateway_jobs{state="succeeded"})') == {"succeeded": 1}
    fates = newest("sum by (fate) (millrace_learner_groups)")
    assert fates["trained"] == record["groups"]["trained"]
    assert newest("sum(millrace_learner_policy_age_steps_count)") == {"": record["groups"]["trained"]}
    assert newest("count(millrace_learner_job_info)") == {"": 1}
    (busy,) = newest("sum(rate(millrace_rollout_busy_seconds_total[20s]))").values()
    assert busy <= 1.1, "more than all the time; a little more is the rate's extrapolation"
    assert not newest('ALERTS{alertstate="firing"}'), "an alert fires in a healthy run"
