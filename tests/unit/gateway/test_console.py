"""The console's page: it is what its sources say, and refers to nothing outside of itself."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "console"
BUILT = ROOT / "rayqueue" / "gateway" / "console"
SINGLE = ("index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts")


def test_the_page_is_built_from_the_sources() -> None:
    folders = [path for name in ("public", "src") for path in (SOURCES / name).rglob("*") if path.is_file()]
    names = sorted([*SINGLE, *(path.relative_to(SOURCES).as_posix() for path in folders)])
    lines = [f"{name} {hashlib.sha256((SOURCES / name).read_bytes()).hexdigest()}\n" for name in names]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert (BUILT / "sources.sha256").read_text().strip() == digest, "run `make console`, and commit what it builds"


def test_the_page_asks_nobody_else() -> None:
    page = (BUILT / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert named
    assert all(name.startswith("./") for name in named)
    assert all((BUILT / name).is_file() for name in named)
    assert "<style" not in page  # the policy allows no inline style, and no inline script
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    for path in (BUILT / "assets").glob("*.css"):
        assert re.findall(r"url\((?!data:)|@import", path.read_text()) == []


def test_the_page_is_served_with_a_policy_that_lets_it_ask_this_gateway_only(rest: httpx.Client) -> None:
    page = rest.get("/", follow_redirects=True)
    assert (page.status_code, page.url.path) == (200, "/console/")
    assert page.text == (BUILT / "index.html").read_text()
    policy = page.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert all("unsafe" not in each and "*" not in each and "http" not in each for each in policy)
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"  # another version of the gateway has another page
    for name in re.findall(r'(?:src|href)="\./(assets/[^"]*)"', page.text):
        asset = rest.get(f"/console/{name}")
        assert asset.status_code == 200
        assert "immutable" in asset.headers["cache-control"]
        assert "content-security-policy" in asset.headers


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["nothing", "assets/nothing.js", "%2e%2e/operations.py", "..%2foperations.py", "assets"]
)
def test_nothing_but_the_pages_files_is_served(rest: httpx.Client, path: str) -> None:
    answer = rest.get(f"/console/{path}")
    assert answer.status_code in (307, 404)
    if answer.status_code == 404:
        assert answer.headers["content-type"] == "application/problem+json"
    assert "import" not in answer.text
