"""Which gateway and which token are meant, where none is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.connection import Address, find_gateway, find_token
from services.cli.stack.state import write_state
from services.common.errors import ConfigError
from services.common.service.process_tree import created_at
from services.common.service.stack_state import UpState

HERE, ELSEWHERE = "http://127.0.0.1:1", "https://elsewhere"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLRACE_URL", "MILLRACE_HOME", "MILLRACE_TOKEN", "MILLRACE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home in which this process is the stack."""
    (tmp_path / "gateway.token").write_text("of-the-stack\n")
    pid, token = os.getpid(), str(tmp_path / "gateway.token")
    write_state(tmp_path, UpState(pid, created_at(pid), HERE, "redis://x", token, ready=True))
    return tmp_path


def test_a_home_gives_the_address_and_the_token_of_its_stack(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gateway(home=home) == Address(HERE, "of-the-stack")
    monkeypatch.setenv("MILLRACE_HOME", str(home))
    assert find_gateway() == Address(HERE, "of-the-stack")


def test_an_argument_goes_before_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_URL", ELSEWHERE)
    monkeypatch.setenv("MILLRACE_TOKEN", "of-the-environment")
    assert find_gateway() == Address(ELSEWHERE, "of-the-environment")
    assert find_gateway(home=home).url == HERE
    assert find_gateway(HERE, "given") == Address(HERE, "given")


def test_the_token_of_a_home_never_goes_to_another_gateway(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(home))
    assert find_gateway(ELSEWHERE).token is None
    assert find_gateway(ELSEWHERE, home=home).token is None


def test_a_token_is_not_shown_with_its_address() -> None:
    assert "secret" not in repr(Address(HERE, "secret"))


def test_a_home_without_a_stack_and_a_url_without_a_scheme_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start it with `millrace up`, or name a gateway by its URL"):
        find_gateway(home=tmp_path)
    with pytest.raises(ConfigError, match="localhost:8080 must begin with http://"):
        find_gateway("localhost:8080")


def test_the_token_is_taken_from_the_nearest_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("of-the-stack\n")
    (tmp_path / "b").write_text("of-the-file\n")
    assert find_token(None) is None
    assert find_token(str(tmp_path / "a")) == "of-the-stack"
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(tmp_path / "b"))
    assert find_token(str(tmp_path / "a")) == "of-the-file"
    monkeypatch.setenv("MILLRACE_TOKEN", "of-the-environment")
    assert find_token(str(tmp_path / "a")) == "of-the-environment"
    monkeypatch.delenv("MILLRACE_TOKEN")
    monkeypatch.setenv("MILLRACE_TOKEN_FILE", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone cannot be read"):
        find_token(None)
