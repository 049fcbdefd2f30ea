"""The console: a page of a few static files, which hold no data. It reads the public API, with the token that people type in.

The files are read once, at the start; a request names one of them exactly or finds nothing, so no path can lead out of their folder.
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
INDEX: Final = "index.html"
DOCS: Final = "/docs"
DOCS_PAGE: Final = "docs.html"

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
"""Everything from here, nothing inline, no frame; and no text can become markup or code, whatever a script does with it."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for anew each time, answered with 304 while unchanged
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str
    """A digest of the content, in quotes."""


def _load(folder: Path) -> dict[str, Asset]:
    """The folder's files by name; what has no known media type is not part of the page."""
    assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[path.name] = Asset(content, MEDIA_TYPES[path.suffix], etag)
    return assets


ASSETS: Final = _load(FOLDER)
PATHS: Final = frozenset({"/", HOME.rstrip("/"), HOME, *(f"{HOME}{name}" for name in ASSETS)})
"""The page's paths, each in full: they need no token."""

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route(HOME.rstrip("/"), methods=["GET", "HEAD"])
async def entrance() -> Response:
    """Leads to the page."""
    return RedirectResponse(HOME, status_code=307, headers=HEADERS)


@router.api_route(DOCS, methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """The API's description, from the same files."""
    return await asset(request, DOCS_PAGE)


@router.api_route(HOME, methods=["GET", "HEAD"])
@router.api_route(f"{HOME}{{name}}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str = INDEX) -> Response:
    """One file of the page."""
    found = ASSETS.get(name)
    if found is None:
        raise HTTPException(404, "there is nothing here")
    headers = {**HEADERS, "ETag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
