"""The gateway answers to the names it is published under, and to no name that somebody else may let point to it."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.common.config.settings import Settings, is_loopback
from services.gateway.middleware.auth import HostCheck, published_names

BOUND_BEYOND: dict[str, Any] = {"bind_host": "0.0.0.0", "gateway_hosts": ["gateway", "Trains.Example"]}  # noqa: S104
FOREIGN = [
    "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.",
    "127.0.0.1.nip.io", "notlocalhost", "gateway.evil.example", "localhost@evil.example", "0x7f000001", "2130706433",
]  # fmt: skip
UNREADABLE = ["", " ", "localhost:", "localhost:x", "localhost:1:2", "[::1", "http://localhost", "local host", "a,b/"]


def client_of(**settings: Any) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{path:path}", lambda _: PlainTextResponse("ok"))])
    made = Settings(**settings)
    check = HostCheck(
        app,
        names=published_names(made),
        any_address=not is_loopback(made.bind_host),
        exempt={"/healthz"},
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(check), base_url="http://x")


async def status(client: httpx.AsyncClient, host: str, path: str = "/jobs") -> int:
    return (await client.get(path, headers={"Host": host})).status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "LOCALHOST:9", "localhost.", "127.0.0.1:8080", "127.8.9.1", "[::1]:8080", "[::1]",
     "millrace.localhost:8080"],
)  # fmt: skip
async def test_a_gateway_on_loopback_answers_to_loopbacks_names_whatever_the_port(host: str) -> None:
    assert await status(client_of(), host) == 200


@pytest.mark.parametrize("settings", [{}, BOUND_BEYOND])
@pytest.mark.parametrize("host", FOREIGN)
async def test_a_foreign_name_is_misdirected(settings: dict[str, Any], host: str) -> None:
    client = client_of(**settings)
    answer = await client.get("/jobs", headers={"Host": host, "X-Forwarded-Host": "localhost"})
    assert answer.status_code in {400, 421}
    assert "evil" not in answer.text
    assert await status(client, host, "/healthz") == 200


@pytest.mark.parametrize("host", UNREADABLE)
async def test_a_header_that_cannot_be_read_is_refused(host: str) -> None:
    assert await status(client_of(), host) == 400


async def test_two_headers_and_none_are_refused() -> None:
    client = client_of()
    twice = await client.get("/jobs", headers=[("Host", "localhost"), ("Host", "evil.example")])
    request = client.build_request("GET", "/jobs")
    del request.headers["Host"]
    assert [twice.status_code, (await client.send(request)).status_code] == [400, 400]


@pytest.mark.parametrize("host", ["192.0.2.7:8080", "0.0.0.0", "[2001:db8::1]"])  # noqa: S104
async def test_an_address_that_is_not_loopbacks_is_known_only_beyond_loopback(host: str) -> None:
    assert await status(client_of(), host) == 421
    assert await status(client_of(**BOUND_BEYOND), host) == 200


@pytest.mark.parametrize("host", ["gateway:8080", "trains.example", "TRAINS.EXAMPLE:443", socket.gethostname()])
async def test_names_that_are_set_and_the_machines_own_are_known_beyond_loopback(host: str) -> None:
    assert await status(client_of(**BOUND_BEYOND), host) == 200


async def test_the_advertised_name_is_known() -> None:
    assert await status(client_of(bind_host="192.0.2.1", advertise_host="node7.cluster"), "node7.cluster:8080") == 200
