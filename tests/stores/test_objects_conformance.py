"""The behaviour of all adapters of the objects port: a directory behind the gateway, and a bucket of a real S3.

Add a new adapter to ADAPTERS; it must pass unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from interlock.errors import BadRequest, PreconditionFailed, TooLarge
from interlock.spark.objects import replacing
from interlock.stores.objects import Found, Method, Objects, open_objects
from tests.support.s3 import S3
from tests.support.system import System, until

ADAPTERS = ("directory", "s3")
ODD_NAMES = ["with space", "a+b", "k=v", "a&b", "über", "日本", "a,b;c", "(1)", "~x", "a'b", "x@y:z", "#1", "what?"]
MIB = 1 << 20


@dataclass
class Store:
    """A separate prefix for each test."""

    objects: Objects
    http: httpx.AsyncClient
    prefix: str = field(default_factory=lambda: str(uuid4()))

    def uri(self, name: str = "a") -> str:
        return f"{self.objects.root}/{self.prefix}/{name}"

    async def put(self, *names: str) -> None:
        for name in names:
            await self.objects.put(self.uri(name), name.encode())

    async def names(self, under: str = "") -> list[str]:
        found = [one async for one in self.objects.list_under(self.uri(under))]
        return sorted(one.uri.removeprefix(self.uri("")) for one in found)

    async def ask(self, method: Method, name: str = "a", *, url: str | None = None, content: bytes = b"") -> int:
        signed = url or await self.objects.sign(method, self.uri(name), 60)
        return (await self.http.request(method, signed, content=content)).status_code


@pytest.fixture(scope="module")
def bucket(s3: S3) -> Iterator[Objects]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        patch.delenv("AWS_ENDPOINT_URL")
        patch.delenv("AWS_REGION")
        yield open_objects(s3.root, endpoint=s3.endpoint, region=s3.region)


@pytest.fixture(params=ADAPTERS)
def store(request: pytest.FixtureRequest, shared: System) -> Store:
    objects = shared.kernel.access.objects if request.param == "directory" else request.getfixturevalue("bucket")
    return Store(objects, shared.http)


async def in_chunks(data: bytes, size: int = 64 * 1024) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def broken_off() -> AsyncIterator[bytes]:
    yield b"x" * MIB
    raise ConnectionResetError


# Whole objects


async def test_put_object_is_read_with_its_size(store: Store) -> None:
    put = await store.objects.put(store.uri(), b"first")
    assert await store.objects.read(store.uri()) == b"first"
    assert await store.objects.read(store.uri(), 5) == b"first"
    with pytest.raises(TooLarge):
        await store.objects.read(store.uri(), 4)
    assert await store.objects.head(store.uri()) == put
    assert (put.uri, put.size) == (store.uri(), 5)


async def test_range_is_limited_to_existing_bytes(store: Store) -> None:
    await store.objects.put(store.uri(), b"0123456789")
    assert await store.objects.read_range(store.uri(), 0, 10) == b"0123456789"
    assert await store.objects.read_range(store.uri(), 3, 4) == b"3456"
    assert await store.objects.read_range(store.uri(), 8, 100) == b"89"
    assert await store.objects.read_range(store.uri(), 10, 1) == b""
    assert await store.objects.read_range(store.uri("b"), 0, 1) is None


async def test_changed_content_changes_the_etag(store: Store) -> None:
    first = await store.objects.put(store.uri(), b"first")
    second = await store.objects.put(store.uri(), b"other")
    assert first.etag != second.etag
    assert await store.objects.read(store.uri()) == b"other"


async def test_empty_object_exists(store: Store) -> None:
    await store.objects.put(store.uri(), b"")
    assert await store.objects.read(store.uri()) == b""


async def test_missing_object_is_none(store: Store, tmp_path: Path) -> None:
    await store.put("a/b")
    for name in ("b", "a", "a/b/c", "a/bc"):
        assert await store.objects.read(store.uri(name)) is None
        assert await store.objects.head(store.uri(name)) is None
        assert await store.objects.read_to(store.uri(name), tmp_path / "copy", 100) is None
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_name_may_have_any_visible_character(store: Store, name: str) -> None:
    await store.objects.put(store.uri(name), b"odd")
    assert await store.names() == [name]
    reply = await store.http.get(await store.objects.sign("GET", store.uri(name), 60))
    assert (reply.status_code, reply.content) == (200, b"odd")


# Streams


async def test_large_stream_is_read_back_unchanged(store: Store, tmp_path: Path) -> None:
    data = hashlib.shake_256(b"seed").digest(12 * MIB + 7)
    written = await store.objects.write(store.uri(), in_chunks(data), limit=len(data))
    assert written.size == len(data)
    read = await store.objects.read_to(store.uri(), tmp_path / "copy", len(data))
    assert read == await store.objects.head(store.uri())
    assert (tmp_path / "copy").read_bytes() == data


async def test_aborted_stream_creates_no_object(store: Store) -> None:
    with pytest.raises(ConnectionResetError):
        await store.objects.write(store.uri(), broken_off())
    assert await store.names() == []


async def test_aborted_stream_keeps_the_old_object(store: Store) -> None:
    await store.objects.put(store.uri(), b"old")
    with pytest.raises(ConnectionResetError):
        await store.objects.write(store.uri(), broken_off())
    assert await store.objects.read(store.uri()) == b"old"


@pytest.mark.parametrize("create", [False, True])
async def test_stream_over_its_limit_creates_no_object(store: Store, create: bool) -> None:
    with pytest.raises(TooLarge) as refused:
        await store.objects.write(store.uri(), in_chunks(b"x" * 1001, 100), limit=1000, create=create)
    assert refused.value.code == "object_too_large"
    assert await store.names() == []


async def test_download_over_its_limit_is_refused_before_reading(store: Store, tmp_path: Path) -> None:
    await store.objects.put(store.uri(), b"x" * 1001)
    with pytest.raises(TooLarge):
        await store.objects.read_to(store.uri(), tmp_path / "copy", 1000)
    assert not (tmp_path / "copy").exists()


# Concurrent writers


async def test_only_one_concurrent_create_succeeds(store: Store) -> None:
    async def create(number: int) -> Found:
        return await store.objects.put(store.uri(), str(number).encode(), create=True)

    outcomes = await asyncio.gather(*(create(n) for n in range(8)), return_exceptions=True)
    (winner,) = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Found)]
    assert await store.objects.read(store.uri()) == str(winner).encode()
    refused = [outcome for outcome in outcomes if isinstance(outcome, PreconditionFailed)]
    assert [error.code for error in refused] == ["object_exists"] * 7


async def test_concurrent_writes_leave_one_complete_object(store: Store) -> None:
    contents = [bytes([65 + n]) * 100_000 for n in range(6)]
    await asyncio.gather(*(store.objects.write(store.uri(), in_chunks(data)) for data in contents))
    assert await store.objects.read(store.uri()) in contents
    assert await store.names() == ["a"]


async def test_concurrent_writes_and_deletes_do_not_fail(store: Store) -> None:
    async def write_and_delete(name: str) -> None:
        for _ in range(10):
            await store.objects.put(store.uri(f"deep/er/{name}"), b"x")
            await store.objects.delete(store.uri(f"deep/er/{name}"))

    await asyncio.gather(*(write_and_delete(str(n)) for n in range(6)))
    assert await store.names() == []


# Listing and deletion


async def test_listing_returns_each_object_once_at_any_depth(store: Store) -> None:
    names = ["a-b", "a/b!", "a/b/c", "a/z", "a0", "b"]
    await store.put(*reversed(names))
    assert await store.names() == names


async def test_prefix_matches_folders_and_not_partial_names(store: Store) -> None:
    await store.put("a/b/c", "a/bc", "a/b.d")
    assert await store.names("a/b/") == ["a/b/c"]
    assert await store.names("a/x/") == []


async def test_delete_is_idempotent(store: Store) -> None:
    await store.put("a/b", "a/c")
    await store.objects.delete(store.uri("a/b"))
    await store.objects.delete(store.uri("a/b"))
    assert await store.names() == ["a/c"]


async def test_deleting_a_prefix_keeps_its_siblings(store: Store) -> None:
    await store.put("a/1/x", "a/1/y/z", "a/10/x", "a/1x")
    assert await store.objects.delete_under(store.uri("a/1/")) == 2
    assert await store.objects.delete_under(store.uri("a/1/")) == 0
    assert await store.names() == ["a/10/x", "a/1x"]


# Invalid URIs


@pytest.mark.parametrize("name", ["", "../a", "a/../b", "a//b", "./a", "a/.", "a/..", "a\0b"])
async def test_uri_outside_the_root_is_an_error(store: Store, name: str) -> None:
    with pytest.raises(ValueError):
        await store.objects.put(store.uri(name), b"x")


async def test_uri_of_another_root_is_an_error(store: Store) -> None:
    for uri in (f"{store.objects.root}x/a", "file:///etc/passwd", "s3://elsewhere/a", store.objects.root):
        with pytest.raises(ValueError):
            await store.objects.read(uri)


async def test_trailing_slash_distinguishes_prefixes_from_objects(store: Store) -> None:
    with pytest.raises(ValueError):
        await store.objects.delete_under(store.uri("a"))
    with pytest.raises(ValueError):
        await store.names("a")
    with pytest.raises(ValueError):
        await store.objects.put(store.uri("a/"), b"x")


# Signed URLs, as used by their holders


async def test_signed_url_works_without_other_credentials(store: Store) -> None:
    assert await store.ask("PUT", content=b"signed") == 200
    assert await store.objects.read(store.uri()) == b"signed"
    reply = await store.http.get(await store.objects.sign("GET", store.uri(), 60))
    assert (reply.status_code, reply.content) == (200, b"signed")
    head = await store.http.head(await store.objects.sign("HEAD", store.uri(), 60))
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "6", b"")


async def test_signed_url_of_a_missing_object_returns_404(store: Store) -> None:
    assert await store.ask("GET") == 404
    assert await store.ask("HEAD") == 404


@pytest.mark.parametrize(
    ("signed", "sent"), [("GET", "PUT"), ("GET", "HEAD"), ("PUT", "GET"), ("HEAD", "GET"), ("GET", "DELETE")]
)
async def test_signed_url_is_valid_for_one_method(store: Store, signed: Method, sent: Method) -> None:
    await store.put("a")
    url = await store.objects.sign(signed, store.uri(), 60)
    assert await store.ask(sent, url=url) in (401, 403)
    assert await store.objects.read(store.uri()) == b"a"


async def test_signed_url_is_valid_for_one_object(store: Store) -> None:
    await store.put("a", "b", "ab", "c/a")
    url = await store.objects.sign("GET", store.uri("a"), 60)
    for other in ("/b?", "/ab?", "/c/a?", "/none?"):
        assert await store.ask("GET", url=url.replace("/a?", other)) in (401, 403)


async def test_changed_query_of_a_signed_url_is_refused(store: Store) -> None:
    await store.put("a")
    url = await store.objects.sign("GET", store.uri(), 60)
    longer = re.sub(r"(expires=\d+)", r"\g<1>0", url, flags=re.IGNORECASE)
    assert longer != url
    for changed in (longer, url[:-1], f"{url}A", f"{url}&uploads=", f"{url}&uploadId=x&partNumber=1", f"{url}&x=y"):
        assert await store.ask("GET", url=changed) in (400, 401, 403), changed
    assert await store.ask("GET", url=url) == 200


async def test_signed_url_expires(store: Store) -> None:
    await store.put("a")
    url = await store.objects.sign("GET", store.uri(), 1)

    async def refused() -> bool:
        return await store.ask("GET", url=url) in (401, 403)

    assert not await refused()
    await until(refused)


@pytest.mark.parametrize("seconds", [0, -1, 8 * 24 * 3600])
async def test_signed_url_lifetime_is_limited_like_in_s3(store: Store, seconds: float) -> None:
    with pytest.raises(BadRequest):
        await store.objects.sign("GET", store.uri(), seconds)


async def test_directory_objects_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    root = tmp_path / "objects"
    before = os.umask(0)
    try:
        objects = open_objects(f"file://{root}")
        await objects.put(f"{objects.root}/a/b/c", b"x")
        with replacing(f"{objects.root}/d/e/f") as draft:
            draft.write_bytes(b"y")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}
    files = {"c", "f"}
    assert files < modes.keys()
    assert {mode for name, mode in modes.items() if name in files} == {0o600}
    assert {mode for name, mode in modes.items() if name not in files} == {0o700}
