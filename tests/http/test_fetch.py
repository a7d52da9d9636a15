"""The standard-library client: it follows no redirects, opens no files, and is bounded in size and time."""

from __future__ import annotations

import asyncio
import hashlib
import urllib.error
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from interlock.http import fetch

BODY = b"x" * 100
REPLIES = {
    "/body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n" + BODY,
    "/moved": b"HTTP/1.1 302 Found\r\nLocation: /body\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        writer.write(REPLIES[path])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_download_writes_the_body_and_returns_its_digest(url: str, tmp_path: Path) -> None:
    digest = await asyncio.to_thread(fetch.download, f"{url}/body", tmp_path / "file", limit=len(BODY))
    assert digest == hashlib.sha256(BODY).hexdigest()
    assert (tmp_path / "file").read_bytes() == BODY


async def test_redirect_is_not_followed(url: str, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="302") as refused:
        await asyncio.to_thread(fetch.download, f"{url}/moved", tmp_path / "file")
    refused.value.close()
    assert not (tmp_path / "file").exists()


async def test_body_over_the_limit_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(fetch.TooLarge):
        await asyncio.to_thread(fetch.download, f"{url}/body", tmp_path / "file", limit=len(BODY) - 1)
    opener = fetch.opener(proxies=False)
    with pytest.raises(fetch.TooLarge):
        await asyncio.to_thread(fetch.read, opener, f"{url}/body", limit=len(BODY) - 1, seconds=30)


async def test_download_past_its_deadline_is_aborted(url: str, tmp_path: Path) -> None:
    with pytest.raises(fetch.TooSlow):
        await asyncio.to_thread(fetch.download, f"{url}/body", tmp_path / "file", deadline=-1.0)


def test_files_of_this_machine_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(urllib.error.URLError, match="unknown url type"):
        fetch.download(f"file://{tmp_path}/secret", tmp_path / "file")
