"""The code verifier: what programs can do, and cannot. A real kernel isolates them; where it does not, these tests are skipped."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.config.settings import Programs, Settings
from services.common.errors import VerifierError
from services.common.programs import sandbox
from services.common.programs.sandbox import CODE_REWARD, last_block
from services.common.spec.reward import RewardSpec
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    Task,
    VerdictStatus,
    VersionSpan,
)
from services.reward.dispatch import Dispatch
from services.reward.pool.pool import Pool
from services.reward.verifiers import code
from services.reward.verifiers.base import Score
from services.reward.verifiers.code import same_output, verify

ADDS = json.dumps({"inputs": ["3 4\n", "1 1"], "outputs": ["7", "2\n"]})
RIGHT = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator lets programs run."""
    monkeypatch.setenv(CODE_REWARD, "1")


def judged(program: str, tests: Any = ADDS, **extra_info: Any) -> Score:
    return verify(f"I think.\n```python\n{program}\n```\nThat is it.", tests, extra_info)


@pytest.fixture(scope="module")
def isolated() -> None:
    """Skips the test where the kernel does not isolate programs."""
    os.environ[CODE_REWARD] = "1"
    try:
        verify("```\npass\n```", "pass", {})
    except VerifierError as error:
        pytest.skip(str(error))
    finally:
        del os.environ[CODE_REWARD]


pytestmark = pytest.mark.usefixtures("isolated")

ANSWERS = [
    (RIGHT, ADDS), ("print(sum(map(int, open(0).read().split())))", ADDS),
    (RIGHT, json.dumps([{"input": "3 4", "output": "7"}])), (RIGHT, json.dumps({"inputs": [["3 4"]], "outputs": [["7"]]})),
    ("def f(x):\n    return x + 1", "assert f(1) == 2\nassert f(-1) == 0"),
    ("def f(x):\n    return x + 1", json.dumps(["assert f(1) == 2", "assert f(2) == 3"])),
    ("def f(x):\n    return x + 1", "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"),
    ("class Solution:\n    def add(self, a, b):\n        return a + b", json.dumps({"fn_name": "add", "inputs": [[3, 4]], "outputs": [7]})),
    ("def add(a, b):\n    return (a, b)", json.dumps({"fn_name": "add", "inputs": ["3\n4"], "outputs": ["[3, 4]"]})),
    ("print(1 / 3)", json.dumps({"inputs": [""], "outputs": ["0.33333333"]})),
    ("import sys, math, collections, heapq, json, random, datetime, decimal, hashlib\nprint(7)\nsys.exit()",
     json.dumps({"inputs": [""], "outputs": ["7"]})),
    ("open('note', 'w').write('7')\nprint(open('note').read())", json.dumps({"inputs": [""], "outputs": ["7"]})),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), ANSWERS)
def test_a_program_that_passes_all_tests_is_right(program: str, tests: str) -> None:
    score = judged(program, tests)
    assert (score.reward, score.accuracy) == (1.0, 1.0), score.detail


def test_rows_may_have_their_tests_in_extra_info_as_the_wire_gives_them() -> None:
    response = f"```\n{RIGHT}\n```"
    assert verify(response, "unused", {"tests": {"inputs": ("3 4",), "outputs": ("7",)}}).reward == 1.0


FAULTY = [
    ("print(7)", ADDS, "1 of 2 tests passed; test 2: '7\\n' is not '2\\n'"),
    ("1 / 0", ADDS, "0 of 2 tests passed; test 1: ZeroDivisionError: division by zero"),
    ("print(", ADDS, "SyntaxError"),
    ("print(7)\nimport sys\nsys.exit(1)", ADDS, "SystemExit: 1"),
    ("print('x' * 10_000_000)", ADDS, "too much output"),
    ("x = ' ' * (1 << 31)", ADDS, "MemoryError"),
    ("import os\nos.kill(os.getpid(), 11)", ADDS, "ended by signal 11"),
    ("import os\nos._exit(0)", "assert f(1) == 2", "it ended before the test did"),
    ("import sys\nsys.exit(0)", "assert f(1) == 2", "it ended before the test did"),
    ("def f(x):\n    return 1", "assert f(1) == 2", "AssertionError"),
    ("def f(x):\n    return True", json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]}), "True is not 1"),
    ("def f(x):\n    return object()", json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]}), "not JSON serializable"),
    ("g = 1", json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]}), "has no attribute 'f'"),
    ("def f(x):\n    return f(x)", "assert f(1) == 2", "RecursionError"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests", "detail"), FAULTY)
def test_a_program_that_does_not_is_wrong_and_the_first_fault_is_shown(program: str, tests: str, detail: str) -> None:
    score = judged(program, tests)
    assert (score.reward, score.accuracy) == (0.0, 0.0)
    assert detail in score.detail


def test_the_share_of_passed_tests_may_be_the_reward() -> None:
    score = judged("print(7)", code_score="share")
    assert (score.reward, score.accuracy) == (0.5, 0.0)


def test_a_program_that_does_not_end_is_stopped_and_fails_its_test_alone() -> None:
    began = time.monotonic()
    score = judged("if input() == '3 4':\n    while True: pass\nprint(2)", code_score="share", code_run_s=0.5)
    assert score.reward == 0.5
    assert "out of time" in score.detail
    assert time.monotonic() - began < 4.0


def test_all_tests_together_end_before_the_checks_limit() -> None:
    tests = json.dumps({"inputs": [""] * 100, "outputs": ["7"] * 100})
    began = time.monotonic()
    assert judged("while True: pass", tests, check_timeout_s=1.0).reward == 0.0
    assert time.monotonic() - began < 1.0 + 2.0  # the other tests use this machine, too


HOSTILE = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)\nprint(7)",
    "files": "print(open({file!r}).read())\nprint(7)",
    "passwords": "print(open('/etc/passwd').read())\nprint(7)",
    "processes": "import os\nos.kill({pid}, 0)\nprint(7)",
    "a shell": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)\nprint(7)",
    "its forker": "import os, signal\nos.kill(1, signal.SIGKILL)\nimport time\ntime.sleep(0.2)\nraise SystemExit(1)",
    "memory of its forker": "import os\nos.open('/proc/1/mem', os.O_RDONLY)\nprint(7)",
    "libraries": "open('/usr/lib/evil', 'w')\nprint(7)",
    "devices": "import os\nos.mknod('/tmp/mem', 0o20666, os.makedev(1, 1))\nprint(7)",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nprint(7)",
    "rights": "import os\nos.setuid(0)\nprint(7)",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))\nprint(7)",
    "processes without end": "import os\nfor _ in range(99): os.fork()\nprint(7)",
    "disk": "f = open('x', 'wb')\nfor _ in range(99): f.write(bytes(1 << 20))\nprint(7)",
    "many files": "kept = [open(str(i), 'w') for i in range(99)]\nprint(7)",
}  # fmt: skip


@pytest.mark.parametrize("reach", HOSTILE)
def test_a_program_reaches_nothing_of_the_machine(reach: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("7")
    secret.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = HOSTILE[reach].format(port=server.getsockname()[1], file=str(secret), pid=os.getpid())
        score = judged(program, json.dumps({"inputs": [""], "outputs": ["7"]}))
    assert score.reward == 0.0, score.detail
    assert "is not '7'" not in score.detail, score.detail


def test_a_program_sees_no_environment() -> None:
    assert (
        judged(
            "import os\nprint(len(os.environ), os.getpid() < 99)", json.dumps([{"input": "", "output": "0 True"}])
        ).reward
        == 1.0
    )


def test_what_a_program_leaves_behind_ends_with_its_run() -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.close(1); os.close(3)\n"
        "        time.sleep(61)\n    os._exit(0)\nprint(7)"
    )
    before = set(psutil.pids())
    assert judged(program, json.dumps({"inputs": [""], "outputs": ["7"]})).reward == 1.0
    later = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in later if "programs.runner" in " ".join(p.info["cmdline"] or ())]


def test_when_the_caller_is_killed_the_program_is_too() -> None:
    caller = os.fork()
    if caller == 0:
        os.setpgid(0, 0)
        judged("import time\ntime.sleep(61)", code_run_s=60.0, check_timeout_s=60.0)
        os._exit(0)
    until = time.monotonic() + 5.0
    while not (mine := _below(caller, least=3)) and time.monotonic() < until:
        time.sleep(0.02)
    assert mine
    os.killpg(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    assert not psutil.wait_procs(mine, timeout=3.0)[1]
    for folder in Path("/tmp").glob("millrace-program-*"):  # noqa: S108
        if not any(folder.iterdir()):
            folder.rmdir()


def _below(pid: int, least: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    return found if len(found) >= least else []


def test_programs_run_where_temporary_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below `millrace up`: a directory that no other user enters, and what services make is their user's alone."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0o077)
    try:
        score = judged("open('x', 'w').write('7')\nprint(open('x').read())", json.dumps([{"input": "", "output": "7"}]))
    finally:
        os.umask(before)
    assert score.reward == 1.0, score.detail
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_on_disk() -> None:
    before = set(Path("/tmp").glob("millrace-program-*"))  # noqa: S108
    judged("open('x', 'w').write('y')")
    assert set(Path("/tmp").glob("millrace-program-*")) <= before  # noqa: S108


@pytest.mark.parametrize("setting", ["0", "", "yes"])
def test_where_the_operator_does_not_allow_it_nothing_runs_and_nothing_is_wrong(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CODE_REWARD, setting)
    with pytest.raises(VerifierError, match="programs do not run here: MILLRACE_CODE_REWARD is not set"):
        judged(RIGHT)


def test_whether_the_kernel_isolates_is_known_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.isolation_fault() == ""
    monkeypatch.setattr(sandbox, "_ask", lambda *_, **__: [{"refused": "unshare: Operation not permitted"}])
    assert sandbox.isolation_fault() == "unshare: Operation not permitted"


def test_where_the_kernel_does_not_isolate_it_fails_unless_the_operator_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sandbox._ask

    def refuses(*arguments: Any, isolated: bool) -> list[dict[str, Any]]:
        return [{"refused": "unshare: Operation not permitted"}] if isolated else real(*arguments, isolated=False)

    monkeypatch.setattr(sandbox, "_ask", refuses)
    with pytest.raises(VerifierError, match=r"the kernel does not isolate them \(unshare: Operation not permitted\)"):
        judged(RIGHT)
    monkeypatch.setenv(CODE_REWARD, "anywhere")
    if not os.__file__.startswith("/root"):
        assert judged(RIGHT).reward == 1.0
    else:
        with pytest.raises(VerifierError, match="Permission denied"):  # the interpreter is root's alone
            judged(RIGHT)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"), ("```\na\n```", "a\n"), ("```py\na\n```\n```python3\nb\n```", "b\n"), ("a", None),
        ("```python\na\n", None), ("```python\na\n```\n```bash\nls\n```", "a\n"), ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\n```", ""),
    ],
)  # fmt: skip
def test_the_last_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert last_block(response) == program


def test_a_response_without_a_program_is_wrong() -> None:
    assert verify("I do not know", ADDS, {}).detail == "no code block found"


@pytest.mark.parametrize(
    "tests", ["", " ", "[]", {}, {"inputs": ["1"], "outputs": []}, [1], 7, {"inputs": [""] * 257, "outputs": [""] * 257},
              {"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}, {"fn_name": "f", "inputs": [1], "outputs": [1]}],
)  # fmt: skip
def test_a_row_without_tests_is_no_wrong_answer(tests: Any) -> None:
    with pytest.raises(VerifierError):
        code.tests_of(tests)


@pytest.mark.parametrize(
    "options", [{"code_score": "most"}, {"code_run_s": 0}, {"code_memory_mib": 1}, {"code_run_s": "2"}]
)
def test_an_option_that_is_none_is_no_wrong_answer(options: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match=next(iter(options))):
        judged(RIGHT, **options)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("7", "7\n", True), ("1 2\n3", "1\n2 3", True), ("", "", True), ("7", "8", False), ("7 8", "7", False), ("0.1000001", "0.1", True),
        ("0.2", "0.1", False), ("1", "1.0", True), ("1.0", "1", False), ("nan", "1.5", False), ("x", "1.5", False), ("YES", "yes", False),
    ],
)  # fmt: skip
def test_outputs_are_the_same_but_for_spaces_and_last_digits(found: str, expected: str, *, same: bool) -> None:
    assert same_output(found, expected) is same


async def test_the_pool_runs_programs_where_the_service_is_allowed_to() -> None:
    """As in the service: the setting reaches the worker, whose own limits hold programs too."""
    spec = RewardSpec(
        verifiers={"*": "code"}, timeout_s=3.0, config={"code": {"code_score": "share", "code_run_s": 0.5}}
    )
    settings = Settings(code_reward=Programs.ISOLATED)
    task = Task("job", 1, 0, 1, Purpose.TRAIN, (Message("user", "?"),), "mine", ADDS, {}, 3, 1.0, 16, 0, 60.0)
    texts = (f"```python\n{RIGHT}\n```", "```python\nprint(7)\n```", "```python\nwhile True: pass\n```")
    rollouts = tuple(Rollout(bytes(8), bytes(8), text, FinishReason.STOP, (VersionSpan(0, 0),)) for text in texts)
    async with Dispatch(spec, Pool(2, environment={CODE_REWARD: "1"}), settings) as dispatch:
        scored = await dispatch.judge(RolloutGroup(task, "rollout-1", bytes(12), rollouts, 0.1))
    found = [(verdict.status, verdict.reward, verdict.accuracy) for verdict in scored.verdicts]
    assert found == [
        (VerdictStatus.SCORED, 1.0, 1.0),
        (VerdictStatus.SCORED, 0.5, 0.0),
        (VerdictStatus.SCORED, 0.0, 0.0),
    ]
