"""Local servers that speak as much of MLflow's, W&B's and SwanLab's HTTP as their own clients need, and keep what they get."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import serving


class Server:
    """A server on a free port of this machine. While `hang` is set, it reads requests and does not answer them."""

    def __init__(self) -> None:
        self.hang = threading.Event()
        self.headers: list[dict[str, str]] = []
        self.turn = threading.Lock()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the answer to one request."""
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its address."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

            def _handle(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                if outer.hang.is_set():
                    stopped.wait()
                    return
                body = json.loads(raw) if raw and b"json" in self.headers.get("content-type", "").encode() else None
                with outer.turn:
                    outer.headers.append(dict(self.headers))
                    status, value = outer.answer(self.command, self.path.partition("?")[0], body)
                data = json.dumps(value).encode()
                self.send_response(status, {404: "Not Found"}.get(status))
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = _handle  # noqa: N815  the base class's names

        stopped = threading.Event()
        with serving(Handler, stopped.set) as url:
            yield url


class MLflowServer(Server):
    """Keeps a row of each metric, as MLflow's own store does: the same key, time, step and value is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.rows: set[tuple[str, str, int, int, float]] = set()
        self.params: dict[str, str] = {}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:  # noqa: ARG002, PLR0911  a table
        match path.removeprefix("/api/2.0/mlflow/"):
            case "experiments/get-by-name":
                if not self.experiments:
                    return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
                ((name, number),) = self.experiments.items()
                return 200, {"experiment": {"experiment_id": number, "name": name, "lifecycle_stage": "active"}}
            case "experiments/create":
                self.experiments[body["name"]] = "1"
                return 200, {"experiment_id": "1"}
            case "runs/search":
                wanted = re.search(r"= '(.*)'", body["filter"])
                assert wanted
                found = [
                    run
                    for run in self.runs.values()
                    if {"key": "millrace.job_id", "value": wanted[1]} in run["data"]["tags"]
                ]
                return 200, {"runs": found}
            case "runs/create":
                info = {
                    "run_id": f"run{len(self.runs)}",
                    "run_uuid": f"run{len(self.runs)}",
                    "experiment_id": "1",
                    "status": "RUNNING",
                }
                run = {
                    "info": info | {"run_name": body["run_name"], "artifact_uri": "", "lifecycle_stage": "active"},
                    "data": {"tags": body["tags"]},
                }
                self.runs[info["run_id"]] = run
                return 200, {"run": run}
            case "runs/log-batch":
                self.rows |= {
                    (body["run_id"], row["key"], int(row["step"]), int(row["timestamp"]), float(row["value"]))
                    for row in body.get("metrics", [])
                }
                self.params |= {item["key"]: item["value"] for item in body.get("params", [])}
                return 200, {}
            case "runs/get":
                return 200, {"run": next(iter(self.runs.values()))}
            case "runs/update":
                self.runs[body["run_id"]]["info"]["status"] = body["status"]
                return 200, {"run_info": self.runs[body["run_id"]]["info"]}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": path}


class WandBServer(Server):
    """Keeps the lines of each run's history file by their offset."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, dict[int, dict[str, Any]]] = {}
        self.config: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self.exits: list[int] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:  # noqa: ARG002
        if path == "/graphql":
            return 200, {"data": self._graphql(body["operationName"], body["variables"])}
        if path.endswith("/file_stream"):
            run = path.split("/")[-2]
            history = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            kept = self.lines.setdefault(run, {})
            kept |= {history["offset"] + number: json.loads(line) for number, line in enumerate(history["content"])}
            if body.get("complete"):
                self.exits.append(body["exitcode"])
        return 200, {}

    def _graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "team"}}
        if operation == "RunResumeStatus":
            kept = self.lines.get(variables["name"])
            if kept is None:
                return {"model": {**project, "bucket": None}}
            newest = json.dumps([json.dumps(kept[max(kept)])] if kept else [])
            return {
                "model": {
                    **project,
                    "bucket": {
                        "id": "r", "name": variables["name"], "summaryMetrics": "{}", "displayName": variables["name"],
                        "logLineCount": 0, "historyLineCount": len(kept), "eventsLineCount": 0, "historyTail": newest,
                        "eventsTail": "[]", "config": "{}", "tags": [], "notes": None, "wandbConfig": '{"t": {}}',
                    },
                }
            }  # fmt: skip
        if operation == "UpsertBucket":
            self.run |= {name: value for name, value in variables.items() if value is not None}
            self.config |= json.loads(variables["config"] or "{}")
            bucket = {
                "id": "r",
                "name": variables["name"],
                "displayName": variables["name"],
                "config": "{}",
                "historyLineCount": 0,
            }
            return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": True}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {}

    def points(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run's history, in order."""
        return [line for _, line in sorted(self.lines.get(run, {}).items())]


class SwanLabServer(Server):
    """Keeps a value for each name and step."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[str, int], float] = {}
        self.states: list[str] = []
        self.experiments: list[dict[str, Any]] = []
        self.profile: dict[str, Any] = {}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:  # noqa: PLR0911  a table
        parts = path.removeprefix("/api/").split("/")
        match [method, *parts]:
            case [_, "login", "api_key"]:
                return 200, {"sid": "s", "expiredAt": "2099-01-01T00:00:00.000Z", "userInfo": {"username": "me"}}
            case ["GET", "project", _, name]:
                return 200, {
                    "cuid": "p",
                    "name": name,
                    "group": {"username": "me"},
                    "visibility": "PRIVATE",
                    "path": f"/me/{name}",
                    "version": 1,
                    "_count": {"experiments": 1},
                }
            case ["POST", "project", _, _, "experiment"]:
                known = bool(self.experiments)
                self.experiments.append(body)
                exp = {
                    "cuid": body["cuid"],
                    "slug": body["cuid"],
                    "name": body["name"],
                    "createdAt": "2026-01-01T00:00:00.000Z",
                }
                return 200 if known else 201, exp
            case ["GET", "house", "metrics", "summaries", *_]:
                return 200, self._summary()
            case ["POST", "house", "metrics"]:
                if body["type"] == "scalar":
                    for item in body["metrics"]:
                        self.values.setdefault((item["key"], int(item["index"])), float(item["data"]))
                return 200, {}
            case ["PUT", *_, "state"]:
                self.states.append(body["state"])
                return 200, {}
            case ["PUT", *_, "profile"]:
                self.profile |= body
                return 200, {}
        return 200, {}

    def _summary(self) -> dict[str, Any]:
        """The newest step of each name, where a resumed run goes on."""
        newest = {name: max(step for other, step in self.values if other == name) for name, _ in self.values}
        return {"log": None, "media": None, "scalar": [{"key": name, "step": step} for name, step in newest.items()]}
