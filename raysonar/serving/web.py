"""The page at `/`: its files, and what browsers are told about them."""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import PurePath

from fastapi import FastAPI, Request
from starlette.responses import Response

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Nothing but the page's own files is loaded or run, nothing is sent elsewhere, and no other page may frame it."""


def _route(name: str) -> str:
    return "/" if name == _INDEX else f"/page/{name}"


_FILES = {
    _route(file.name): (_TYPES[PurePath(file.name).suffix], file.read_bytes())
    for file in (files("raysonar.serving") / "page").iterdir()
}
PAGE_PATHS = frozenset(_FILES)
"""The routes of its files."""


def add_page(app: FastAPI) -> None:
    """Serve the page."""
    for path, (media_type, content) in _FILES.items():
        app.add_route(path, _responder(media_type, content))


def _responder(media_type: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return respond
