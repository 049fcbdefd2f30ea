"""A hub on this machine that speaks enough of Hugging Face's and ModelScope's HTTP for their own libraries, and misbehaves on request.

Two servers: the hub, and the store that it redirects large files of Hugging Face to, as the real one does. That one is to get no token.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 64 * 1024
"""Larger files are large ones to git: the listing has their sha256."""
PIECE = 64 * 1024


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    first_byte: int
    """Of the Range; 0 without one."""
    token: str
    """All that the request brings as a secret."""
    store: bool
    """Whether the store of large files was asked."""


@dataclass
class Repo:
    """A repository: files by commit, and the names of commits."""

    commits: dict[str, dict[str, bytes]]
    names: dict[str, str]
    status: int = 200
    """Answered to every request for its files."""
    hidden: bool = False
    """Whether nobody may know that it exists."""


@dataclass
class FakeHub:
    """The servers. `with FakeHub() as hub:`; repositories by `models/ORG/NAME`, `datasets/ORG/NAME`."""

    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    drop_after: int | None = None
    """Bytes of a file after which a connection is dropped, as often as `drops` says."""
    drops: int = 0
    stall_after: int | None = None
    """First byte of a file that does not come, though the connection stays open."""
    piece_s: float = 0.0
    """Seconds between two pieces of a file."""
    _servers: list[_Server] = field(default_factory=list)

    def __enter__(self) -> Self:
        for is_store in (False, True):
            server = _Server(self, is_store=is_store)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        self.stall_after, self.piece_s = None, 0.0
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        """The hub's address."""
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def store_url(self) -> str:
        """The store's address, a host of another name."""
        return f"http://localhost:{self._servers[1].server_address[1]}"

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Adds a commit to a repository, on its main branch; its id."""
        commit = hashlib.sha1(
            f"{name}{len(self.repos)}{sorted(files)}{files}".encode(), usedforsecurity=False
        ).hexdigest()
        repo = self.repos.setdefault(name, Repo({}, {}))
        repo.commits[commit] = files
        repo.names |= {"main": commit, "master": commit}
        return commit

    def be_well(self) -> None:
        """Behaves from now on, and forgets what it was asked."""
        self.drop_after, self.stall_after, self.drops, self.piece_s = None, None, 0, 0.0
        self.asked.clear()

    def bytes_of(self, name: str) -> list[int]:
        """First bytes of the requests for a file's content."""
        return [
            item.first_byte
            for item in self.asked
            if name in item.path and item.method == "GET" and "info" not in item.path
        ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub, *, is_store: bool) -> None:
        self.hub, self.is_store = hub, is_store
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    """One connection to the hub, or to its store."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Writes no log."""

    def do_HEAD(self) -> None:
        self.handle_one()

    def do_POST(self) -> None:
        self.handle_one()

    def do_GET(self) -> None:
        self.handle_one()

    def handle_one(self) -> None:
        hub, is_store = self.server.hub, self.server.is_store
        address = urlsplit(self.path)
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        secret = (self.headers.get("Authorization") or "") + (self.headers.get("Cookie") or "")
        hub.asked.append(Asked(self.command, self.path, first, secret, is_store))
        try:
            if is_store:
                self.content(hub.repos["/".join(parts[:3])].commits[parts[3]]["/".join(parts[4:])])
            elif parts[:2] == ["api", "v1"]:
                self.model_scope(parts[2], "/".join(parts[3:5]), parts[5:])
            elif parts[0] == "api":
                self.hugging_face(parts[1], "/".join(parts[2:4]), parts[4:])
            else:
                kind, rest = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
                self.resolve(kind, "/".join(rest[:2]), rest[3], "/".join(rest[4:]))
        except KeyError:
            self.fault(404, "EntryNotFound")

    def fault(self, status: int, code: str = "") -> None:
        self.reply(
            status, json.dumps({"Code": status, "Message": code}).encode(), {"X-Error-Code": code} if code else {}
        )

    def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, document: object) -> None:
        self.reply(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def files(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files; None where an error was answered."""
        hub = self.server.hub
        repo = hub.repos.get(f"{kind}/{name}")
        if repo is None or repo.hidden:
            self.fault(401 if "/api/v1/" not in self.path else 404, "RepoNotFound")
            return None
        commit = repo.names.get(revision, revision)
        if commit not in repo.commits:
            self.fault(404, "RevisionNotFound")
            return None
        return commit, repo.commits[commit]

    def hugging_face(self, kind: str, name: str, rest: list[str]) -> None:
        found = self.files(kind, name, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return
        commit, files = found
        if rest[:1] == ["paths-info"]:
            wanted = parse_qs(self.body)["paths"]
            self.json(
                [{"type": "file", "path": path, "oid": _blob(files[path]), **_sizes(files[path])} for path in wanted]
            )
            return
        siblings = [
            {"rfilename": path, "blobId": _blob(content), **(_sizes(content) if "blobs" in self.query else {})}
            for path, content in files.items()
        ]
        self.json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        hub = self.server.hub
        found = self.files(kind, name, revision)
        if found is None:
            return
        status = hub.repos[f"{kind}/{name}"].status
        if status != 200:
            self.fault(status, "GatedRepo" if status == 403 else "")
            return
        commit, files = found
        if len(files[path]) > LARGE_BYTES:
            location = f"{hub.store_url}/{kind}/{name}/{commit}/{path}?signature=of-an-hour"
            self.reply(302, b"", {"Location": location, "X-Repo-Commit": commit})
        else:
            self.content(files[path])

    def model_scope(self, kind: str, name: str, rest: list[str]) -> None:
        hub = self.server.hub
        revision = self.query.get("Revision", "master")
        found = self.files(kind, name, revision)
        if found is None:
            return
        repo = hub.repos[f"{kind}/{name}"]
        if rest == ["repo"]:
            if repo.status != 200:
                self.fault(repo.status)
            else:
                self.content(found[1][self.query["FilePath"]])
            return
        root = self.query.get("Root", "").strip("/")
        names = [path for path in found[1] if path.rpartition("/")[0] == root]
        files = [_entry(repo, path, found[1][path]) for path in names]
        self.json({"Code": 200, "Success": True, "Data": {"Files": files, "IsVisual": 0}})

    def content(self, content: bytes) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {
            "ETag": f'"{_blob(content)}"',
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(content) - start),
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(206 if start else 200)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.send_pieces(content, start)

    def send_pieces(self, content: bytes, start: int) -> None:
        hub = self.server.hub
        for at in range(start, len(content), PIECE):
            if hub.drop_after is not None and at - start >= hub.drop_after and hub.drops > 0:
                hub.drops -= 1
                self.close_connection = True
                self.connection.close()
                return
            while hub.stall_after is not None and at >= hub.stall_after:
                time.sleep(0.05)
            try:
                self.wfile.write(content[at : at + PIECE])
            except OSError:
                self.close_connection = True
                return
            time.sleep(hub.piece_s)


def _blob(content: bytes) -> str:
    """Git's id of a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sizes(content: bytes) -> dict[str, Any]:
    """Size of a file, with its sha256 where it is a large one."""
    if len(content) <= LARGE_BYTES:
        return {"size": len(content)}
    digest = hashlib.sha256(content).hexdigest()
    large = {"size": len(content), "sha256": digest, "oid": digest, "pointerSize": 134}
    return {"size": len(content), "lfs": large}


def _entry(repo: Repo, path: str, content: bytes) -> dict[str, Any]:
    """A file as ModelScope lists it, with the first commit that had this content."""
    numbers = {commit: number for number, commit in enumerate(repo.commits)}
    commit = next(commit for commit, files in repo.commits.items() if files.get(path) == content)
    return {
        "Path": path, "Name": path.rpartition("/")[2], "Size": len(content), "Type": "blob", "Revision": commit,
        "Sha256": hashlib.sha256(content).hexdigest(), "CommittedDate": 1_700_000_000 + numbers[commit],
    }  # fmt: skip
