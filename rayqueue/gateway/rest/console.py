"""Console: the page for people, from files of this installation.

``console/`` has its sources; what they make is committed as
``rayqueue/gateway/console``, so that neither a wheel's build nor its user needs
Node. The page holds nothing of the queue and no secret: it asks the routes, with
the key that its user types. Its policy lets it ask nobody but this gateway, and
run nothing but its own files.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

FILES = Path(__file__).parent.parent / "console"
PUBLIC = ("/", "/console")
"""Needs no key: it is the same for everybody."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NAMED_BY_CONTENTS = "public, max-age=31536000, immutable"


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: MutableMapping[str, Any]) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        response.headers["Cache-Control"] = _NAMED_BY_CONTENTS if path.startswith("assets") else "no-cache"
        return response


def add_console(app: FastAPI) -> None:
    async def to_console(_: Request) -> Response:
        return RedirectResponse("/console/", 307)

    for path in ("/", "/console"):
        app.add_route(path, to_console, methods=["GET"], include_in_schema=False)
    app.mount("/console/", _Files(directory=FILES, html=True), name="console")
