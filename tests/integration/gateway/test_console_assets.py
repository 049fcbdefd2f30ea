from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import redis.asyncio
from fastapi import FastAPI

from services.common.config.settings import Settings
from services.common.spec.job import JobSpec
from services.gateway.admission.admission import Admission
from services.gateway.app import create_app
from services.gateway.routes.console import ASSETS, FOLDER, HEADERS, HOME, PATHS

FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
STRAY = [
    "/console/../app.py",
    "/console/..%2fapp.py",
    "/console/%2e%2e/app.py",
    "/console/..%5capp.py",
    "/console/....//app.py",
    "/console//main.js",
    "/console/main.js/",
    "/console/main.js%00",
    "/console/MAIN.JS",
    "/console/nothing.js",
    "/console//etc/passwd",
    "/consolex",
    "//console/",
]


def raw(path: str) -> httpx.Request:
    """A request whose path is sent as it is written."""
    return httpx.Request("GET", httpx.URL("http://gateway").copy_with(raw_path=path.encode()))


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_the_page_needs_no_token_and_bears_its_headers(stranger: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "HEAD"):
        answer = await stranger.request(method, path)
        assert answer.status_code == (307 if path in {"/", HOME.rstrip("/")} else 200)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


async def test_the_root_leads_to_the_page(stranger: httpx.AsyncClient) -> None:
    for path in ("/", "/console"):
        answer = await stranger.get(path, follow_redirects=True)
        assert answer.url.path == HOME
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.text == (FOLDER / "index.html").read_text()


async def test_the_apis_description_is_one_of_the_pages_under_the_same_headers(stranger: httpx.AsyncClient) -> None:
    answer = await stranger.get("/docs")
    assert answer.text == (FOLDER / "docs.html").read_text()
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    named = re.findall(r'(?:src|href)="(/console/[^"]+)"', answer.text)
    assert named
    for path in named:
        assert (await stranger.get(path)).status_code == 200


async def test_the_page_is_open_beyond_loopback_too_and_the_data_are_not(
    redis: redis.asyncio.Redis, tmp_path: Path, token: str, unchecked: Admission
) -> None:
    transport = httpx.ASGITransport(
        create_app(
            Settings(home=tmp_path, bind_host="192.0.2.1", gateway_hosts=["gateway"]), redis, token, admission=unchecked
        )
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as opened:
        assert (await opened.get(HOME)).status_code == 200
        for path in ("/jobs", "/workers", "/jobs/schema", "/docs", "/metrics"):
            assert (await opened.get(path)).status_code == 401


@pytest.mark.parametrize("path", STRAY)
async def test_a_path_that_only_resembles_the_pages_needs_the_token_and_finds_nothing(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient, path: str
) -> None:
    assert (await stranger.send(raw(path))).status_code == 401
    request = raw(path)
    request.headers["Authorization"] = client.headers["Authorization"]
    assert (await client.send(request)).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_the_page_can_only_be_read(stranger: httpx.AsyncClient, method: str) -> None:
    answer = await stranger.request(method, f"{HOME}main.js")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_an_unchanged_file_is_not_sent_again(stranger: httpx.AsyncClient) -> None:
    first = await stranger.get(f"{HOME}main.js")
    again = await stranger.get(f"{HOME}main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    changed = await stranger.get(f"{HOME}main.js", headers={"If-None-Match": '"another"'})
    assert changed.content == first.content


def test_every_file_of_the_folder_is_served_and_no_other() -> None:
    assert sorted(ASSETS) == [path.name for path in FILES]
    assert {path for path in PATHS if path.count("/") == 2} == {HOME, *(f"{HOME}{path.name}" for path in FILES)}


def test_the_policy_allows_nothing_inline_nothing_foreign_and_no_frame() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not {"script-src", "style-src", "connect-src", "img-src"} & set(policy)
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_a_foreign_host_or_reads_text_as_markup(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage.*token", text
    )
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=\"", text)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_every_imported_module_is_there(path: Path) -> None:
    for name in re.findall(r'^import .* from "(.*)";$', path.read_text(), re.MULTILINE):
        assert name.removeprefix("./") in ASSETS


async def test_the_example_to_start_from_is_a_valid_spec(client: httpx.AsyncClient) -> None:
    answer = await client.get(f"{HOME}example.json")
    assert JobSpec.model_validate(json.loads(answer.text)).eval.enabled


async def test_requests_for_the_page_are_counted_by_route(client: httpx.AsyncClient, app: FastAPI) -> None:
    await client.get(f"{HOME}main.js")
    text = (await client.get("/metrics")).text
    assert 'route="/console/{name}",status="200"} 1.0' in text
    assert not any(path.startswith("/console") for path in app.openapi()["paths"])
