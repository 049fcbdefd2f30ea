"""Console: a page of a few static files without data. Its script reads the public API with the token that the user types in.

The files are read once, at the start; a request names one of them exactly or gets 404, so no path can lead out of their folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

FOLDER: Final = Path(__file__).parents[1] / "console"
HOME: Final = "/console/"

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml; charset=utf-8",
}

POLICY: Final = (
    "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Resources of this origin only, nothing inline, no frame; Trusted Types keep a script from making markup or code of text."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated on each use: 304 while unchanged
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str
    """Digest of the content, in quotes."""


def _load(folder: Path) -> dict[str, Asset]:
    """The folder's files by name; a file without a known media type is not part of the page."""
    assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[path.name] = Asset(content, MEDIA_TYPES[path.suffix], etag)
    return assets


ASSETS: Final = _load(FOLDER)
PATHS: Final = frozenset({"/", HOME.rstrip("/"), HOME, *(f"{HOME}{name}" for name in ASSETS)})
"""The page's full paths, which need no token."""

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route(HOME.rstrip("/"), methods=["GET", "HEAD"])
async def entrance() -> Response:
    """Redirects to the page."""
    return RedirectResponse(HOME, status_code=307, headers=HEADERS)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """The API's description, from the same files."""
    return await asset(request, "docs.html")


@router.api_route(HOME, methods=["GET", "HEAD"])
@router.api_route(f"{HOME}{{name}}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str = "index.html") -> Response:
    """One file of the page."""
    found = ASSETS.get(name)
    if found is None:
        raise HTTPException(404, "there is nothing here")
    headers = {**HEADERS, "ETag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
