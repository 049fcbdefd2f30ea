from __future__ import annotations

import base64
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from starlette.responses import PlainTextResponse

from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.gateway.middleware.auth import BearerAuth, load_token, open_paths

TOKEN = "t" * 40


def test_a_generated_token_has_256_bits_is_private_and_is_reused(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    token = load_token(settings)
    file = tmp_path / "home" / "gateway.token"
    assert len(base64.urlsafe_b64decode(token + "=")) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() == token == load_token(settings)
    assert [path.name for path in file.parent.iterdir()] == ["gateway.token"]


def test_gateways_that_start_at_once_agree_on_one_token(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: load_token(settings), range(32)))
    assert len(tokens) == 1


def test_a_token_file_that_others_could_read_is_made_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "gateway.token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert load_token(Settings(home=tmp_path)) == TOKEN
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert TOKEN not in caplog.text


def test_a_set_token_wins_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{TOKEN}\n")
    assert load_token(Settings(home=tmp_path / "home", token_file=file)) == TOKEN
    assert load_token(Settings(home=tmp_path / "home", token=SecretStr("x"))) == "x"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("token", ["", "two words", "naïve", "line\nbreak"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(token: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MILLRACE_TOKEN") as caught:
        load_token(Settings(home=tmp_path, token=SecretStr(token)))
    assert not token or token not in str(caught.value)


def test_an_empty_token_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "gateway.token").touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"gateway\.token is empty"):
        load_token(Settings(home=tmp_path))


def test_a_home_that_cannot_hold_the_token_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/gateway\.token"):
        load_token(Settings(home=tmp_path / "file"))


def test_beyond_loopback_a_long_token_must_be_set(tmp_path: Path) -> None:
    load_token(Settings(home=tmp_path))
    with pytest.raises(ConfigError, match="MILLRACE_TOKEN"):
        load_token(Settings(home=tmp_path, bind_host="0.0.0.0"))  # noqa: S104  that is what is refused
    with pytest.raises(ConfigError, match="it needs 32"):
        load_token(Settings(home=tmp_path, bind_host="192.0.2.1", token=SecretStr("x" * 31)))
    assert load_token(Settings(home=tmp_path, bind_host="192.0.2.1", token=SecretStr("x" * 32)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_metrics_and_docs_are_open_on_loopback_only(host: str) -> None:
    assert open_paths(Settings(bind_host=host)) == {"/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"}
    assert open_paths(Settings(bind_host="10.0.0.1")) == {"/healthz", "/readyz"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", f"Bearer {TOKEN}")], 200),
        ([("authorization", f"bearer {TOKEN}")], 200),
        ([], 401),
        ([("Authorization", "")], 401),
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("Authorization", TOKEN)], 401),
        ([("Authorization", f"Basic {TOKEN}")], 401),
        ([("Authorization", f"Bearer {TOKEN}x")], 401),
        ([("Authorization", f"Bearer {TOKEN[:-1]}")], 401),
        ([("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")], 401),
        ([("X-Token", TOKEN)], 401),
        ([("Cookie", f"Authorization=Bearer {TOKEN}")], 401),
    ],
)
async def test_only_one_header_with_the_whole_token_lets_in(headers: list[tuple[str, str]], status: int) -> None:
    app = BearerAuth(PlainTextResponse("in"), token=TOKEN, open_paths=frozenset())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answer = await client.get("/anything", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == 'Bearer realm="millrace"'
        assert answer.json() == {"error": {"code": "unauthorized", "message": "a valid bearer token is needed"}}


@pytest.mark.parametrize("path", ["/healthz/", "//healthz", "/healthz/../jobs", "/HEALTHZ", "/healthz%00"])
async def test_a_path_that_only_resembles_an_open_one_is_guarded(path: str) -> None:
    app = BearerAuth(PlainTextResponse("in"), token=TOKEN, open_paths=frozenset({"/healthz"}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport) as client:
        request = httpx.Request("GET", httpx.URL("http://gateway").copy_with(raw_path=path.encode()))
        assert (await client.send(request)).status_code == 401
