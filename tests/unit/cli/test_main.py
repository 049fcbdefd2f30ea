"""The command line: usage, exit codes, and errors that say what to do next."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer

from services.cli.commands.options import COMPLETION_TIMEOUT_S, complete_job
from services.cli.main import app
from services.cli.stack.state import home_lock, write_state
from services.cli.up import run_down
from services.common.errors import ConfigError
from services.common.service.process_tree import created_at
from services.common.service.stack_state import ProcessState, UpState, read_state, require_state


def millrace(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False, timeout=60)


def completing(what: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The installed script, as a shell's completion runs it."""
    script = Path(sys.executable).with_name("millrace")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environment |= {"_MILLRACE_COMPLETE": what, **variables}
    return subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False, timeout=60)


def state_of(home: Path, pid: int, created: float) -> UpState:
    state = UpState(pid, created, "http://127.0.0.1:1", "redis://x", None, ready=True)
    write_state(home, state)
    return state


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    done = millrace("--help")
    assert done.returncode == 0
    for command in (
        "up", "down", "submit", "jobs", "show", "rollouts", "pause", "resume", "cancel", "delete", "prune", "ledger", "audit", "replay",
        "plan", "workers", "logs", "doctor", "data",
    ):  # fmt: skip
        assert f" {command} " in done.stdout
    code = "import sys, services.cli.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {
        "pydantic",
        "httpx",
        "redis",
        "numpy",
        "reasoning_gym",
        "torch",
        "vllm",
        "fastapi",
        "pandas",
        "pyarrow",
        "psutil",
    }
    assert not heavy & set(loaded)


def test_version_is_the_installed_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    done = millrace("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"millrace {project['version']}\n", "")


def cpu_s(*arguments: str) -> float:
    """Processor time of a Python process, in seconds: it depends less on what else the machine does than the time that passes."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def test_help_takes_less_than_a_second_and_at_most_twice_that_of_an_application_with_one_command() -> None:
    smallest = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"
    ours = min(cpu_s("-m", "services.cli.main", "--help") for _ in range(3))
    assert ours < 1.0
    assert ours < 2 * min(cpu_s("-c", smallest) for _ in range(3))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_for_the_common_shells(shell: str) -> None:
    done = completing(f"source_{shell}")
    assert done.returncode == 0
    assert "complete_" + shell in done.stdout


def test_where_no_gateway_answers_nothing_is_completed_and_nothing_is_said(tmp_path: Path) -> None:
    done = completing("complete_bash", MILLRACE_HOME=str(tmp_path), COMP_WORDS="millrace show ", COMP_CWORD="2")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_completion_waits_for_a_silent_gateway_no_longer_than_its_timeout() -> None:
    context = typer.Context(typer.main.get_command(app))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        context.params = {"home": None, "url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        complete_job(context, "")  # imports what the second call does not have to
        begun = time.monotonic()
        assert complete_job(context, "") == []
        assert COMPLETION_TIMEOUT_S <= time.monotonic() - begun < COMPLETION_TIMEOUT_S + 1.0


def test_wrong_usage_ends_with_2() -> None:
    assert millrace("submit").returncode == 2
    assert millrace("up", "--rollout", "many").returncode == 2


def test_without_a_stack_the_next_step_is_named(tmp_path: Path) -> None:
    done = millrace("jobs", "--home", str(tmp_path))
    assert done.returncode == 1
    assert "start it with `millrace up`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gateway_that_is_away_is_named() -> None:
    done = millrace("jobs", "--url", "http://127.0.0.1:1", MILLRACE_TOKEN="x")  # noqa: S106
    assert done.returncode == 1
    assert "http://127.0.0.1:1 does not answer" in done.stderr


def test_an_address_without_a_scheme_is_refused() -> None:
    done = millrace("jobs", "--url", "localhost:8080")
    assert done.returncode == 1
    assert "must begin with http://" in done.stderr


def test_a_broken_job_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("[")
    done = millrace("submit", str(path), "--home", str(tmp_path))
    assert done.returncode == 1
    assert "job.yaml: is not valid YAML" in done.stderr


def test_a_taken_port_is_named_with_the_option_that_helps(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = millrace("up", "--home", str(tmp_path), "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be taken" in done.stderr
    assert "--port" in done.stderr
    assert read_state(tmp_path) is None


def test_the_state_is_for_its_owner_only_and_reads_back(tmp_path: Path) -> None:
    processes = {"redis": ProcessState(1, 2.0, 3, ready=True, restarts=4)}
    state = UpState(7, 1.5, "http://x", "redis://x", "/token", ready=False, processes=processes)
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / "up.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["up.json"]


@pytest.mark.parametrize("text", ["", "{", json.dumps({"pid": "x"})])
def test_a_state_that_cannot_be_read_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "up.json").write_text(text)
    assert read_state(tmp_path) is None


def test_a_reused_process_id_is_not_taken_for_the_stack(tmp_path: Path) -> None:
    assert state_of(tmp_path, os.getpid(), created_at(os.getpid())).is_alive()
    state_of(tmp_path, os.getpid(), created_at(os.getpid()) - 100)
    with pytest.raises(ConfigError, match="nothing is up"):
        require_state(tmp_path)


def test_down_ends_what_a_killed_supervisor_left(tmp_path: Path) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        processes = {"learner-0": ProcessState(left.pid, created_at(left.pid), 1, ready=True, restarts=0)}
        write_state(tmp_path, UpState(os.getpid(), 1.0, "http://x", "redis://x", None, ready=True, processes=processes))
        said: list[str] = []
        run_down(tmp_path, said.append, grace_s=0.2)
        assert left.wait(10) == -9
        assert said == ["killing what an earlier `millrace up` left: learner-0"]
        assert read_state(tmp_path) is None
    finally:
        left.kill()
        left.wait()


def test_down_without_a_stack_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    run_down(tmp_path, said.append)
    assert said == [f"nothing is up in {tmp_path}"]


def test_a_home_is_held_by_one_only(tmp_path: Path) -> None:
    with home_lock(tmp_path), pytest.raises(ConfigError, match="already up"), home_lock(tmp_path):
        pass
    with home_lock(tmp_path):
        pass
