"""Settings that are secrets, and the name under which others reach a service."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.common.config.settings import Settings, load_settings
from services.common.errors import ConfigError

FILES = ("MILLRACE_TOKEN_FILE", "MILLRACE_INTERNAL_TOKEN_FILE", "MILLRACE_REDIS_PASSWORD_FILE")


@pytest.mark.parametrize("variable", FILES)
def test_a_secret_comes_from_its_file_and_is_never_shown(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("canary\n")
    monkeypatch.setenv(variable, str(tmp_path / "secret"))
    settings = load_settings()
    secret = getattr(settings, variable.removeprefix("MILLRACE_").removesuffix("_FILE").lower())
    assert secret.get_secret_value() == "canary"
    assert "canary" not in repr(settings)


@pytest.mark.parametrize("variable", FILES)
@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot read {}: No such file or directory"), ("\n", "{} is empty")]
)
def test_a_missing_or_empty_secret_file_is_one_line_that_names_variable_and_file(
    variable: str, content: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(variable, str(file))
    with pytest.raises(ConfigError) as raised:
        load_settings()
    assert str(raised.value) == f"{variable}: {words.format(file)}"


@pytest.mark.parametrize("variable", ["MILLRACE_INTERNAL_TOKEN", "MILLRACE_REDIS_PASSWORD"])
def test_an_empty_secret_is_refused_and_never_means_none(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(ConfigError, match=f"^{variable}: "):
        load_settings()


def test_a_service_on_all_addresses_is_reached_by_its_machines_name() -> None:
    assert Settings(bind_host="0.0.0.0").advertise_host == socket.gethostname()  # noqa: S104
    assert Settings(bind_host="0.0.0.0", advertise_host="learner").advertise_host == "learner"  # noqa: S104
    assert Settings(bind_host="127.0.0.1").advertise_host is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[gateway.example", "is no JSON list"),
        ('["https://gateway.example"]', "is no host's name"),
        ('["gateway.example:8080"]', "is no host's name"),
        ('[""]', "is no host's name"),
    ],
)
def test_a_list_of_hosts_that_is_none_is_one_line_that_names_the_variable(
    value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_GATEWAY_HOSTS", value)
    with pytest.raises(ConfigError, match=f"^MILLRACE_GATEWAY_HOSTS: .*{words}") as raised:
        load_settings()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gateway.example", "gateway", "10.0.0.1", "2001:db8::1"])
def test_a_gateway_may_be_published_under_any_name_or_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_GATEWAY_HOSTS", f'["{name}"]')
    assert load_settings().gateway_hosts == [name]


@pytest.mark.parametrize(("text", "value"), [(None, "0"), ("0", "0"), ("1", "1"), ("anywhere", "anywhere")])
def test_programs_of_a_model_run_when_the_operator_says_so(
    text: str | None, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_CODE_REWARD", raising=False)
    if text is not None:
        monkeypatch.setenv("MILLRACE_CODE_REWARD", text)
    settings = load_settings()
    assert (settings.code_reward, settings.runs_code) == (value, value != "0")


def test_another_word_for_it_is_an_error_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CODE_REWARD", "yes")
    with pytest.raises(ConfigError, match="MILLRACE_CODE_REWARD: Input should be '0', '1' or 'anywhere'"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "hosts"), [("Envs.example.org:8000, [::1]:80", ["envs.example.org:8000", "[::1]:80"]), ("", [])]
)
def test_the_operator_names_hosts_and_ports_of_openenv_servers(
    text: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_OPENENV_HOSTS", text)
    assert load_settings().openenv_hosts == hosts


@pytest.mark.parametrize("text", ["http://localhost:8000", "localhost", "::1:8000", "*:80", "a:80/x"])
def test_what_is_no_host_and_port_is_an_error_of_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_OPENENV_HOSTS", text)
    with pytest.raises(ConfigError, match=r"MILLRACE_OPENENV_HOSTS: .*is no host and port"):
        load_settings()


@pytest.mark.parametrize("value", ["/one:/two", '["/one", "/two"]', " /one : /two :"])
def test_directories_are_written_as_in_a_path_or_as_json(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_DATA_ROOTS", value)
    assert load_settings().data_roots == [Path("/one"), Path("/two")]


@pytest.mark.parametrize(
    ("value", "hubs"), [("hf", ["hf"]), ("hf, modelscope", ["hf", "modelscope"]), ("[]", []), ("", [])]
)
def test_names_are_written_with_commas_or_as_json(value: str, hubs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HUBS", value)
    assert load_settings().hubs == hubs
