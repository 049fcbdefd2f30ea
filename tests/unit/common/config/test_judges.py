"""Judge endpoints: the operator's setting, its keys, and what a job may name of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.config.judges import JudgeEndpoint, check_judges
from services.common.config.settings import Settings, load_settings
from services.common.errors import ConfigError
from services.common.spec.scorers import JudgeSpec

VARIABLE = "MILLRACE_JUDGE_ENDPOINTS"
PLAIN = JudgeEndpoint(url="http://10.0.0.7:8000/v1/", model="m")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("local", "must be a JSON object"),
        ("[]", "should be a valid dictionary"),
        ('{"a b": {"url": "http://x/v1"}}', "a b"),
        ('{"a": {}}', "a.url: Field required"),
        ('{"a": {"url": "file:///etc/passwd"}}', "a.url: is no http"),
        ('{"a": {"url": "http://user:pw@x/v1"}}', "a.url: has a user"),
        ('{"a": {"url": "http://x/v1?key=1"}}', "a.url: has a user, a query"),
        ('{"a": {"url": "http://x/v1", "key": "secret"}}', "a.key: Extra inputs"),
        ('{"a": {"url": "http://x/v1", "key_file": "/k", "key_variable": "K"}}', "a: has both"),
        ('{"a": {"url": "http://x/v1", "requests_at_once": 0}}', "a.requests_at_once"),
    ],
)
def test_a_wrong_endpoint_is_one_line_that_names_it(value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: .*{words}") as raised:
        load_settings()
    assert "\n" not in str(raised.value)
    assert "pw@" not in str(raised.value)


def test_a_key_comes_from_its_file_or_variable_and_is_in_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("canary-1\n")
    monkeypatch.setenv("OF_THE_JUDGE", "canary-2")
    endpoints = {
        "file": PLAIN.model_copy(update={"key_file": tmp_path / "key"}),
        "variable": PLAIN.model_copy(update={"key_variable": "OF_THE_JUDGE"}),
    }
    keys = [endpoint.read_key(name) for name, endpoint in endpoints.items()]
    assert [key.get_secret_value() for key in keys if key is not None] == ["canary-1", "canary-2"]
    assert "canary" not in repr(keys)
    settings = Settings(judge_endpoints=endpoints)
    assert "canary" not in f"{settings!r} {settings.public()}"
    assert PLAIN.read_key("plain") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("", "is empty"), ("two\nlines", "not one line"), ("schlüssel", "ASCII")],
)
def test_a_key_that_cannot_be_had_names_endpoint_and_file(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"{VARIABLE}: far\.key_file: {file}.*{words}"):
        PLAIN.model_copy(update={"key_file": file}).read_key("far")


def test_a_job_names_an_endpoint_that_exists_and_a_model_that_it_has() -> None:
    endpoints = {"local": PLAIN, "bare": JudgeEndpoint(url="http://x/v1")}
    check_judges({"a": JudgeSpec(endpoint="local"), "b": JudgeSpec(endpoint="bare", model="m")}, endpoints)
    with pytest.raises(ConfigError) as raised:
        check_judges({"a": JudgeSpec(endpoint="locla"), "b": JudgeSpec(endpoint="bare")}, endpoints)
    first, second = raised.value.problems
    assert first.field == "reward.judges.a.endpoint"
    assert first.message == "there is no judge endpoint 'locla'; there are bare, local; did you mean local?"
    assert (second.field, "endpoint 'bare' has no model" in second.message) == ("reward.judges.b.model", True)
    with pytest.raises(ConfigError, match=f"there are none \\({VARIABLE}"):
        check_judges({"a": JudgeSpec(endpoint="local")}, {})
