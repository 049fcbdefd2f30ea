"""A gateway that a test writes: what it answers, and what it was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from millrace.client import Client
from millrace.gateway import GatewayClient

RECORD: dict[str, Any] = {
    "id": "demo-0000000a", "name": "demo", "state": "queued", "cause": "", "step": 0, "steps": 3, "tags": ["first"], "notes": "",
    "spec": {"name": "demo", "learner": {"lr": 1e-6}, "tags": ["first"]},
}  # fmt: skip


class StandIn:
    """One job, which makes a step at each look at it and then ends in `end`; every third answer is a 503."""

    def __init__(self, steps: int = 3, end: str = "succeeded", cause: str = "", *, outages: bool = False) -> None:
        self.record = RECORD | {"steps": steps}
        self.evals: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str, Any]] = []
        self._end, self._cause, self._outages = end, cause, outages

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, request.url.path, body))
        if self._outages and len(self.asked) % 3 == 0:
            return httpx.Response(503, json={"error": {"message": "Redis does not answer"}})
        if request.url.path == "/jobs" and request.method == "POST":
            self.record = RECORD | {"id": "demo-0000000b", "spec": body}
            return httpx.Response(201, json=self.record)
        if request.url.path == "/jobs":
            return httpx.Response(200, json={"jobs": [self.record]})
        if request.url.path == "/v1/chat/completions":
            return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS))
        if request.url.path.endswith("/metrics"):
            first, made = int(request.url.params["from"]), self.record["step"]
            steps = [{"step": n, "reward": n / 10, "groups": {"trained": n}} for n in range(first, made + 1)]
            return httpx.Response(200, json={"steps": steps, "evals": [e for e in self.evals if e["step"] <= made]})
        if request.method == "PATCH":
            self.record = {**self.record, **(body or {})}
        elif request.method == "GET":
            self._move()
        return httpx.Response(200, json=self.record)

    def _move(self) -> None:
        if self.record["state"] == "running":
            self.record = self.record | {"step": self.record["step"] + 1}
        over = self.record["step"] == self.record["steps"]
        self.record = self.record | {"state": self._end if over else "running", "cause": self._cause if over else ""}

    def gateway(self) -> GatewayClient:
        client = GatewayClient("http://gateway", "secret")
        return on_transport(client, self)

    def client(self) -> Client:
        client = Client("http://gateway", "secret")
        on_transport(client.gateway, self)
        return client


def on_transport(gateway: GatewayClient, answer: Callable[[httpx.Request], httpx.Response]) -> GatewayClient:
    gateway._http = httpx.Client(base_url=gateway.url, transport=httpx.MockTransport(answer))
    return gateway


CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"content": "for"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "ty"}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "policy_version": {"min": 3, "max": 4}},
]
