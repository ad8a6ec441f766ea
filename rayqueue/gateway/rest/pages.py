"""Pages: the OpenAPI document and its readers, Swagger UI and ReDoc, from files of this installation."""

from __future__ import annotations

from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

PUBLIC = ("/openapi.json", "/docs", "/redoc", "/docs/static")
"""Needs no key: it says what can be asked, nothing of the queue."""


def add_pages(app: FastAPI, document: bytes) -> None:
    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def docs(_: Request) -> Response:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="RayQueue",
            swagger_js_url="/docs/static/swagger-ui-bundle.js",
            swagger_css_url="/docs/static/swagger-ui.css",
            swagger_favicon_url="/docs/static/favicon.png",
        )

    async def redoc(_: Request) -> Response:
        return get_redoc_html(
            openapi_url="/openapi.json",
            title="RayQueue",
            redoc_js_url="/docs/static/redoc.standalone.js",
            redoc_favicon_url="/docs/static/favicon.png",
            with_google_fonts=False,
        )

    for path, page in (("/openapi.json", openapi), ("/docs", docs), ("/redoc", redoc)):
        app.add_route(path, page, methods=["GET"], include_in_schema=False)
    files = Path(fastapi_offline.__file__).parent / "static"
    app.mount("/docs/static", StaticFiles(directory=files), name="docs-static")
