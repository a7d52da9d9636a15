"""The dashboard's files: headers, caching, compression, the page of a checkout without them, and path traversal."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from interlock.apps import dashboard_files
from interlock.apps.dashboard_files import Bundle
from tests.support.system import System


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>The page</title>")
    (folder / "assets" / "app-0123abcd.js").write_text("console.log('hello')")
    (tmp_path / "secret.txt").write_text("a secret")
    (folder / "assets" / "linked.txt").symlink_to(tmp_path / "secret.txt")
    monkeypatch.setattr(dashboard_files, "_bundle", Bundle(folder))
    return folder


async def get(system: System, path: str, **headers: str) -> httpx.Response:
    return await system.http.get(system.gateway_url + path, headers=headers)


@pytest.mark.parametrize("path", ["/ui/", "/ui/runs", "/ui/run/0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b", "/ui/job/v2.1"])
async def test_page_is_served_at_each_of_its_paths(shared: System, static: Path, path: str) -> None:
    reply = await get(shared, path)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "The page" in reply.text
    assert reply.headers["cache-control"] == "no-store"


async def test_page_cannot_be_framed_and_loads_nothing_from_elsewhere(shared: System, static: Path) -> None:
    headers = (await get(shared, "/ui/")).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert "http" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


async def test_asset_is_cached_forever_and_compressed_on_request(shared: System, static: Path) -> None:
    plain = await get(shared, "/ui/assets/app-0123abcd.js", **{"Accept-Encoding": "identity"})
    assert plain.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert plain.headers["content-type"] == "text/javascript; charset=utf-8"
    assert plain.text == "console.log('hello')"
    async with (
        httpx.AsyncClient() as client,
        client.stream("GET", shared.gateway_url + "/ui/assets/app-0123abcd.js") as raw,
    ):
        body = b"".join([part async for part in raw.aiter_raw()])
        assert raw.headers["content-encoding"] == "gzip"
    assert gzip.decompress(body) == plain.content


async def test_missing_asset_is_not_answered_with_the_page(shared: System, static: Path) -> None:
    for path in ("/ui/assets/app-ffffffff.js", "/ui/favicon.ico", "/ui/assets/no-extension"):
        reply = await get(shared, path)
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../secret.txt",
        "/ui/%2e%2e/secret.txt",
        "/ui/..%2fsecret.txt",
        "/ui/assets/..%2f..%2fsecret.txt",
        "/ui/assets/%2e%2e/%2e%2e/secret.txt",
        "/ui//etc/passwd.txt",
        "/ui/assets/..\\..\\secret.txt",
        "/ui/%00secret.txt",
        "/ui/assets/linked.txt",
    ],
)
async def test_no_path_leads_out_of_the_folder(shared: System, static: Path, path: str) -> None:
    where = urlsplit(shared.gateway_url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    reply = await reader.read()
    writer.close()
    assert b" 404 " in reply.splitlines()[0]
    assert b"a secret" not in reply


async def test_new_build_is_served_without_a_restart(shared: System, static: Path) -> None:
    await get(shared, "/ui/")
    (static / "index.html").write_text("<title>Another page</title>")
    assert "Another page" in (await get(shared, "/ui/")).text


async def test_checkout_without_the_bundle_explains_how_to_build_it(
    shared: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_files, "_bundle", Bundle(tmp_path / "nothing"))
    reply = await get(shared, "/ui/")
    assert reply.status_code == 503
    assert "make ui" in reply.text


async def test_root_redirects_browsers_to_the_page_and_programs_to_the_document(shared: System) -> None:
    browser = await get(shared, "/", Accept="text/html,application/xhtml+xml")
    assert (browser.status_code, browser.headers["location"]) == (307, "/ui/")
    program = await get(shared, "/", Accept="application/json")
    assert (program.status_code, program.headers["location"]) == (307, "/openapi.json")
