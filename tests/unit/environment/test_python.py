"""Environment `python`: programs run only where the operator lets them, and what they print comes back; the answer alone is rewarded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.common.errors import ConfigError, ProgramError
from services.common.programs import sandbox
from services.common.programs.sandbox import CODE_ENVIRONMENT, Outcome
from services.environment import switches
from services.environment.base import Environment, Observation
from services.environment.registry import World, make
from services.environment.worlds.python import is_same, shown

ROW = {"question": "What is 12 to the power of 5?", "answer": "12 * 12 is 144 …\n#### 248,832"}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator lets programs run."""
    monkeypatch.setenv(CODE_ENVIRONMENT, "1")
    switches.programs_fault.cache_clear()
    yield
    switches.programs_fault.cache_clear()


@pytest.fixture
def isolated() -> None:
    """Skips the test where the kernel does not isolate programs."""
    if fault := switches.programs_fault():
        pytest.skip(fault)


def begun(**config: Any) -> Environment:
    environment = make(World.PYTHON, config)
    environment.reset(1, ROW)
    return environment


def ran(environment: Environment, program: str) -> str:
    (message,) = environment.step(f"I try.\n```python\n{program}\n```").messages
    assert message.role == "tool"
    return message.content


@pytest.mark.usefixtures("isolated")
def test_a_policy_that_runs_a_program_and_repeats_its_output_is_right() -> None:
    environment = make(World.PYTHON, {})
    (asked,) = environment.reset(1, ROW).messages
    assert asked.content.endswith(ROW["question"])
    printed = ran(environment, "print(12 ** 5)")
    assert printed == "248832"
    assert environment.step(f"It is #### {printed}") == Observation(
        done=True, reward=1.0, accuracy=1.0, detail="248832 is right"
    )


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("x = 1", "(nothing was printed)"),
        ("print(1)\n1 / 0", "1\nerror: ZeroDivisionError: division by zero"),
        ("while True: pass", "error: out of time"),
        ("print('x' * 100)", f"{'x' * 30}\n(cut: 100 characters)"),
        ("open('/etc/passwd')", "error: FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'"),
    ],
)
def test_what_a_program_does_comes_back_and_ends_nothing(program: str, says: str) -> None:
    assert ran(begun(seconds=0.5, output_chars=30), program) == says


@pytest.mark.usefixtures("isolated")
def test_programs_beyond_the_last_call_end_the_episode_without_a_reward() -> None:
    environment = begun(calls=1)
    assert ran(environment, "print(2)") == "2"
    assert environment.step("```python\nprint(2)\n```").reward == 0.0


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("#### 248832", 1.0),
        ("248,832.0", 1.0),
        ("$248832.", 1.0),
        ("#### 248833", 0.0),
        ("", 0.0),
        ("248832 or 7", 0.0),
    ],
)
def test_the_answer_alone_is_rewarded(reply: str, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "isolation_fault", lambda: "")
    assert begun().step(reply).reward == reward


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [("Paris", "paris", True), (" New  York", "new york", True), ("0.50", ".5", False), ("-3", "-3.0", True),
        ("x", "1", False), ("1e3", "1000", False)],
)  # fmt: skip
def test_answers_are_the_same_number_or_the_same_words(given: str, expected: str, *, same: bool) -> None:
    assert is_same(given, expected) is same


@pytest.mark.parametrize("setting", ["0", "", "yes"])
def test_it_is_refused_until_the_operator_lets_programs_run(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CODE_ENVIRONMENT, setting)
    with pytest.raises(ConfigError, match=r"off on this server until its operator sets MILLRACE_CODE_ENVIRONMENT=1"):
        make(World.PYTHON, {})


def test_the_switch_of_rewards_does_not_let_it_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CODE_ENVIRONMENT)
    monkeypatch.setenv(sandbox.CODE_REWARD, "1")
    with pytest.raises(ConfigError, match="MILLRACE_CODE_ENVIRONMENT=1"):
        make(World.PYTHON, {})


def test_it_is_refused_where_the_kernel_does_not_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "isolation_fault", lambda: "unshare: Operation not permitted")
    with pytest.raises(ConfigError, match=r"does not isolate them \(unshare: .*MILLRACE_CODE_ENVIRONMENT=anywhere"):
        make(World.PYTHON, {})


def test_a_runner_that_fails_is_never_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "isolation_fault", lambda: "")
    environment = begun()
    monkeypatch.setattr(sandbox, "_ask", lambda *_, **__: [{"refused": "unshare: Operation not permitted"}])
    with pytest.raises(ProgramError, match="programs do not run here"):
        environment.step("```python\nprint(1)\n```")


@pytest.mark.parametrize(
    "row", [{}, {"question": "?"}, {"answer": "7"}, {"question": " ", "answer": "7"}, {"question": "?", "answer": [7]}]
)
def test_a_row_without_question_or_answer_is_named(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "isolation_fault", lambda: "")
    with pytest.raises(ValueError, match=r"extra_info\.(question|answer) of the row must be a text or a number"):
        make(World.PYTHON, {}).reset(1, row)


@pytest.mark.parametrize(
    "config", [{"calls": -1}, {"seconds": 0}, {"seconds": "2"}, {"memory_mib": 1}, {"output_chars": 0}, {"question": 7}]
)
def test_a_wrong_setting_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(config))} must be"):
        make(World.PYTHON, config)


def test_an_output_is_cut_with_its_error() -> None:
    assert shown(Outcome("late", 0, "x" * 9, {}), 4) == "xxxx\n(cut: 9 characters)\nerror: out of time"
