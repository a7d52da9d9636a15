"""Objects in a directory over the gateway's HTTP: the reach of signed URLs and object tokens, and failures."""

from __future__ import annotations

import asyncio
import base64
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.access.signed_urls import SignedUrls
from interlock.clock import ManualClock
from interlock.errors import BadRequest, Unauthenticated
from interlock.stores.objects import DirectoryObjects, canonical_key
from interlock.stores.objects.tree import Tree
from interlock.stores.signers import ORDER
from tests.conftest import copied
from tests.support.polls import eventually
from tests.support.system import System, fence, running

LIMIT = 300_000
BODY_LIMIT = 100_000
FULLWIDTH_DOTS = "\N{FULLWIDTH FULL STOP}" * 2
DOT_LEADERS = "\N{ONE DOT LEADER}" * 2
DATASET, VERSION = str(uuid4()), str(uuid4())


@dataclass
class ObjectGateway:
    system: System
    root: Path
    claim: dict[str, Any]
    token: str
    """An object token of an attempt that writes one dataset."""
    prefix: str
    """The write prefix of the attempt, as an object key."""

    @property
    def objects(self) -> DirectoryObjects:
        assert isinstance(self.system.kernel.access.objects, DirectoryObjects)
        return self.system.kernel.access.objects

    def new_key(self, name: str = "a") -> str:
        return f"{self.prefix}{uuid4()}/{name}"

    async def ask(self, method: str, key: str, query: str = "", **more: Any) -> httpx.Response:
        """Sends a request with the object token."""
        headers = {"Authorization": f"Bearer {self.token}"} | more.pop("headers", {})
        url = f"{self.system.gateway_url}/v1/objects/{key}{query}"
        return await self.system.http.request(method, url, headers=headers, **more)

    async def put(self, key: str, content: bytes, **more: Any) -> httpx.Response:
        reply = await self.ask("PUT", key, content=content, **more)
        assert reply.status_code == 200, reply.text
        return reply

    async def begin(self, key: str) -> str:
        reply = await self.ask("POST", key, "?uploads")
        assert reply.status_code == 200, reply.text
        return str(reply.json()["upload_id"])

    async def put_part(self, key: str, upload_id: str, number: int, content: bytes) -> dict[str, Any]:
        reply = await self.ask("PUT", key, f"?uploadId={upload_id}&partNumber={number}", content=content)
        assert reply.status_code == 200, reply.text
        return {"part_number": number, "etag": reply.json()["etag"]}

    async def complete(self, key: str, upload_id: str, parts: list[dict[str, Any]]) -> httpx.Response:
        return await self.ask("POST", key, f"?uploadId={upload_id}", json={"parts": parts})

    def uploads(self) -> list[str]:
        folder = self.root / "_uploads"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def files(self) -> set[str]:
        found = (path for path in self.root.rglob("*") if path.is_file() and "_uploads" not in path.parts)
        return {str(path.relative_to(self.root)) for path in found}


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ObjectGateway]:
    folder = tmp_path_factory.mktemp("objects")
    async with (
        copied(postgres_url, template) as url,
        running(url, folder, object_limit_bytes=LIMIT, body_limit_bytes=BODY_LIMIT) as system,
    ):
        yield await _site(system)


async def _site(system: System) -> ObjectGateway:
    outputs = [{"dataset_uuid": DATASET, "dataset_version": VERSION}]
    claim = await system.claim(await system.one(outputs=outputs, policy={"lease_seconds": 3600}))
    reply = await system.attempt("/v1/task/credentials", claim["capability_token"], fence(claim))
    assert reply.status_code == 200, reply.text
    minted = reply.json()
    root = system.kernel.access.objects.root
    return ObjectGateway(
        system,
        Path(root.removeprefix("file://")),
        claim,
        minted["object_token"],
        minted["write_prefixes"][0].removeprefix(f"{root}/"),
    )


@pytest.fixture
def key(site: ObjectGateway) -> str:
    return site.new_key()


# Reading


async def test_get_returns_bytes_and_etag_with_no_executable_media_type(site: ObjectGateway, key: str) -> None:
    written = await site.put(key, b"<script>")
    reply = await site.ask("GET", key)
    assert (reply.status_code, reply.content) == (200, b"<script>")
    assert reply.headers["etag"] == written.headers["etag"] == f'"{written.json()["etag"]}"'
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-disposition"] == "attachment"
    assert reply.headers["cache-control"] == "private, no-store"


RANGES = [
    ("bytes=0-0", b"0", "bytes 0-0/10"),
    ("bytes=2-4", b"234", "bytes 2-4/10"),
    ("bytes=7-", b"789", "bytes 7-9/10"),
    ("bytes=-3", b"789", "bytes 7-9/10"),
    ("bytes=-99", b"0123456789", "bytes 0-9/10"),
    ("bytes=5-99", b"56789", "bytes 5-9/10"),
]


@pytest.mark.parametrize(("asked", "got", "said"), RANGES, ids=[asked for asked, _, _ in RANGES])
async def test_single_range_is_returned(site: ObjectGateway, key: str, asked: str, got: bytes, said: str) -> None:
    await site.put(key, b"0123456789")
    reply = await site.ask("GET", key, headers={"Range": asked})
    assert (reply.status_code, reply.content, reply.headers["content-range"]) == (206, got, said)


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "bytes=-", "bytes=4-2", "lines=1-2", "bytes=x-", "bytes=1-2;"])
async def test_unsupported_range_returns_the_whole_object(site: ObjectGateway, key: str, asked: str) -> None:
    await site.put(key, b"0123456789")
    reply = await site.ask("GET", key, headers={"Range": asked})
    assert (reply.status_code, reply.content) == (200, b"0123456789")


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=99-100", "bytes=-0"])
async def test_range_beyond_the_end_is_refused_with_the_size(site: ObjectGateway, key: str, asked: str) -> None:
    await site.put(key, b"0123456789")
    reply = await site.ask("GET", key, headers={"Range": asked})
    assert (reply.status_code, reply.json()["code"]) == (416, "range_not_satisfiable")
    assert reply.headers["content-range"] == "bytes */10"


async def test_range_with_an_outdated_etag_returns_the_whole_object(site: ObjectGateway, key: str) -> None:
    old = (await site.put(key, b"old")).headers["etag"]
    new = (await site.put(key, b"new")).headers["etag"]
    for tag, status, content in ((old, 200, b"new"), (new, 206, b"n")):
        reply = await site.ask("GET", key, headers={"Range": "bytes=0-0", "If-Range": tag})
        assert (reply.status_code, reply.content) == (status, content)


async def test_reader_keeps_the_object_it_opened(site: ObjectGateway, key: str) -> None:
    await site.put(key, b"old" * 50_000)
    opened = await site.objects.open(site.objects.uri(key))
    assert opened is not None
    chunks = opened.chunks(0, opened.found.size)
    await site.put(key, b"new")
    assert b"".join([chunk async for chunk in chunks]) == b"old" * 50_000


async def test_readers_that_leave_early_leave_no_open_files(site: ObjectGateway, key: str) -> None:
    await site.put(key, b"x" * LIMIT)
    target = str(site.root / key)

    def held() -> int:
        return sum(1 for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == target)

    url = await site.objects.sign("GET", site.objects.uri(key), 60)
    async with site.system.http.stream("GET", url) as reply:
        assert reply.status_code == 200
    await site.ask("GET", key, headers={"Range": "bytes=999999-"})
    await site.ask("HEAD", key)
    await eventually(lambda: held() == 0 or None)


# Writing


async def test_chunked_body_needs_no_length(site: ObjectGateway, key: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 1000

    reply = await site.ask("PUT", key, content=chunks())
    assert (reply.status_code, reply.json()["size"]) == (200, 10_000)


async def test_put_may_only_create(site: ObjectGateway, key: str) -> None:
    await site.put(key, b"first", headers={"If-None-Match": "*"})
    again = await site.ask("PUT", key, content=b"second", headers={"If-None-Match": "*"})
    assert (again.status_code, again.json()["code"]) == (412, "object_exists")
    assert (await site.ask("GET", key)).content == b"first"


@pytest.mark.parametrize(
    "condition", [{"If-None-Match": '"x"'}, {"If-Match": '"x"'}, {"Content-Range": "bytes 0-1/2"}], ids=str
)
async def test_unsupported_condition_is_refused(site: ObjectGateway, key: str, condition: dict[str, str]) -> None:
    reply = await site.ask("PUT", key, content=b"x", headers=condition)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert key not in site.files()


async def test_object_may_exceed_the_request_body_limit(site: ObjectGateway, key: str) -> None:
    written = await site.put(key, b"x" * (BODY_LIMIT + 1))
    assert written.json()["size"] == BODY_LIMIT + 1


async def test_object_over_the_limit_is_refused_with_or_without_length(site: ObjectGateway, key: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 100_000

    for content in (b"x" * (LIMIT + 1), chunks()):
        reply = await site.ask("PUT", key, content=content)
        assert (reply.status_code, reply.json()["code"]) == (413, "object_too_large")
    assert key not in site.files()
    await eventually(lambda: not site.uploads() or None)


async def test_object_cannot_replace_a_folder(site: ObjectGateway, key: str) -> None:
    await site.put(f"{key}/below", b"x")
    for other in (key, f"{key}/below/deeper"):
        reply = await site.ask("PUT", other, content=b"y")
        assert (reply.status_code, reply.json()["code"]) == (409, "object_in_the_way")
    assert (await site.ask("GET", key)).status_code == 404


async def test_aborted_put_leaves_nothing(site: ObjectGateway, key: str) -> None:
    _, writer = await asyncio.open_connection(*_address(site))
    head = (
        f"PUT /v1/objects/{key} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.token}\r\nContent-Length: 9\r\n\r\n"
    )
    writer.write(head.encode() + b"torn")
    await eventually(lambda: site.uploads() or None)
    writer.close()
    await writer.wait_closed()
    await eventually(lambda: not site.uploads() or None)
    assert key not in site.files()


async def test_full_disk_is_reported_and_leaves_nothing(site: ObjectGateway, key: str) -> None:
    before = site.uploads()
    with _disk_of(100_000):
        reply = await site.ask("PUT", key, content=b"x" * 200_000)
    assert (reply.status_code, reply.json()["code"]) == (503, "object_store_full")
    assert "free space" in reply.json()["detail"]
    assert key not in site.files()
    assert site.uploads() == before
    await site.put(key, b"x" * 200_000)


async def test_concurrent_puts_leave_one_complete_object(site: ObjectGateway, key: str) -> None:
    contents = [bytes([65 + n]) * 200_000 for n in range(4)]
    await asyncio.gather(*(site.put(key, content) for content in contents))
    assert (await site.ask("GET", key)).content in contents
    assert site.uploads() == []


# Uploads in parts


async def test_parts_are_joined_in_order_of_their_numbers(site: ObjectGateway, key: str) -> None:
    upload = await site.begin(key)
    parts = [await site.put_part(key, upload, n, str(n).encode() * 3) for n in (10, 2, 1)]
    assert key not in site.files()
    reply = await site.complete(key, upload, sorted(parts, key=lambda part: int(part["part_number"])))
    assert (reply.status_code, reply.json()["size"]) == (200, 12)
    assert (await site.ask("GET", key)).content == b"111222101010"
    assert site.uploads() == []


async def test_repeated_part_replaces_the_first_one(site: ObjectGateway, key: str) -> None:
    upload = await site.begin(key)
    old = await site.put_part(key, upload, 1, b"old")
    new = await site.put_part(key, upload, 1, b"new")
    refused = await site.complete(key, upload, [old])
    assert (refused.status_code, refused.json()["code"]) == (400, "bad_part")
    assert (await site.complete(key, upload, [new])).status_code == 200
    assert (await site.ask("GET", key)).content == b"new"


@pytest.mark.parametrize("named", [[2, 1], [1, 1], [1, 3], []], ids=str)
async def test_inconsistent_parts_create_no_object(site: ObjectGateway, key: str, named: list[int]) -> None:
    upload = await site.begin(key)
    parts = {n: await site.put_part(key, upload, n, b"x") for n in (1, 2)}
    reply = await site.complete(key, upload, [parts.get(n, {"part_number": n, "etag": "x"}) for n in named])
    assert reply.status_code == 400, reply.text
    assert key not in site.files()
    assert (await site.ask("DELETE", key, f"?uploadId={upload}")).status_code == 204


async def test_upload_is_bound_to_one_object(site: ObjectGateway, key: str) -> None:
    upload, other = await site.begin(key), site.new_key("other")
    part = await site.put_part(key, upload, 1, b"x")
    for reply in (
        await site.ask("PUT", other, f"?uploadId={upload}&partNumber=1", content=b"y"),
        await site.complete(other, upload, [part]),
        await site.ask("DELETE", other, f"?uploadId={upload}"),
    ):
        assert (reply.status_code, reply.json()["code"]) == (404, "no_such_upload")
    assert (await site.complete(key, upload, [part])).status_code == 200


@pytest.mark.parametrize("upload", ["x", "..", "../..", "a" * 32, "%2e%2e"])
async def test_unknown_upload_is_not_found(site: ObjectGateway, key: str, upload: str) -> None:
    for reply in (
        await site.ask("PUT", key, f"?uploadId={upload}&partNumber=1", content=b"y"),
        await site.complete(key, upload, [{"part_number": 1, "etag": "x"}]),
        await site.ask("DELETE", key, f"?uploadId={upload}"),
    ):
        assert (reply.status_code, reply.json()["code"]) == (404, "no_such_upload")


@pytest.mark.parametrize("number", ["0", "10001", "-1", "x", "", "01"])
async def test_part_number_is_required(site: ObjectGateway, key: str, number: str) -> None:
    upload = await site.begin(key)
    reply = await site.ask("PUT", key, f"?uploadId={upload}&partNumber={number}", content=b"y")
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_part")
    assert (await site.ask("DELETE", key, f"?uploadId={upload}")).status_code == 204


async def test_parts_together_respect_the_object_size_limit(site: ObjectGateway, key: str) -> None:
    upload = await site.begin(key)
    await site.put_part(key, upload, 1, b"x" * 200_000)
    reply = await site.ask("PUT", key, f"?uploadId={upload}&partNumber=2", content=b"x" * 200_000)
    assert (reply.status_code, reply.json()["code"]) == (413, "object_too_large")
    await site.put_part(key, upload, 1, b"x" * LIMIT)
    assert (await site.ask("DELETE", key, f"?uploadId={upload}")).status_code == 204
    assert site.uploads() == []


async def test_idle_upload_is_swept_and_an_active_one_is_kept(site: ObjectGateway, key: str) -> None:
    old, new = await site.begin(key), await site.begin(key)
    (site.root / "_uploads" / "draft").write_bytes(b"of a process that was killed")
    stale = (datetime.now(UTC) - timedelta(days=2)).timestamp()
    for name in (old, "draft"):
        os.utime(site.root / "_uploads" / name, (stale, stale))
    await site.system.pass_of("sweep")
    assert site.uploads() == [new]
    assert (await site.complete(key, old, [{"part_number": 1, "etag": "x"}])).status_code == 404
    assert (await site.ask("DELETE", key, f"?uploadId={new}")).status_code == 204


async def test_each_upload_step_needs_its_own_signed_url(site: ObjectGateway, key: str) -> None:
    urls, http = site.system.kernel.access.signed_urls, site.system.http
    begun = await http.post(await urls.sign("POST", key, 60, [("uploads", "")]))
    upload = [("uploadId", str(begun.json()["upload_id"]))]
    first = await urls.sign("PUT", key, 60, [*upload, ("partNumber", "1")])
    part = await http.put(first, content=b"by url")
    assert (await http.put(first.replace("partNumber=1", "partNumber=2"), content=b"x")).status_code == 401
    assert (
        await http.put(await urls.sign("PUT", key, 60) + "&uploadId=x&partNumber=1", content=b"x")
    ).status_code == 401
    parts = {"parts": [{"part_number": 1, "etag": part.headers["etag"]}]}
    ended = await http.post(await urls.sign("POST", key, 60, upload), json=parts)
    assert (ended.status_code, ended.json()["size"]) == (200, 6)


async def test_post_and_delete_require_an_upload_action(site: ObjectGateway, key: str) -> None:
    await site.put(key, b"stays")
    for method in ("POST", "DELETE"):
        reply = await site.ask(method, key)
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_request")
    assert (await site.ask("GET", key)).content == b"stays"


# Keys


HOSTILE = [
    "../escaped", "%2e%2e/escaped", "%2E%2e/escaped", ".%2e/escaped", "..%2fescaped", "%252e%252e/escaped", "./a",
    "a/.", "a/..", "a//b", "a/", "a%2fb", "a%5cb", "a%5c..%5cb", "a%00", "a%0a", "a%0d%0ab", "a%7f", "a%25", "a%2541",
    "%c0%ae%c0%ae/a", "a%ff", "%ef%bc%8e%ef%bc%8e/a", "%e2%80%a4%e2%80%a4/a", "%ef%bc%8fa", "%e2%80%ae", "%e2%80%8b",
    "a%cc%88", "a" * 256, "b/" * 600 + "c", "a%ed%a0%80",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_object_key_has_one_spelling(site: ObjectGateway, name: str) -> None:
    before = site.files()
    for method in ("GET", "PUT"):
        assert await _raw(site, method, f"/v1/objects/{site.prefix}{name}") == 400
    assert site.files() == before


async def test_unfinished_upload_is_not_readable_as_an_object(site: ObjectGateway, key: str) -> None:
    upload = await site.begin(key)
    await site.put_part(key, upload, 1, b"hidden")
    urls, http = site.system.kernel.access.signed_urls, site.system.http
    for name in ("target", "00001"):
        hidden = f"_uploads/{upload}/{name}"
        assert (await site.ask("GET", hidden)).status_code == 400
        assert (await http.get(await urls.sign("GET", hidden, 60))).status_code == 400
        with pytest.raises(ValueError):
            await site.objects.read(site.objects.uri(hidden))
    listed = [one.uri async for one in site.objects.list_under(f"{site.objects.root}/")]
    assert not [uri for uri in listed if "_uploads" in uri]
    assert (await site.ask("DELETE", key, f"?uploadId={upload}")).status_code == 204


async def test_symbolic_link_is_neither_read_nor_written_through(site: ObjectGateway, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", site.root / site.prefix / "links"
    secret.write_bytes(b"secret")
    folder.mkdir(parents=True)
    (folder / "file").symlink_to(secret)
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    for name in ("file", "folder/secret", "pipe", "folder"):
        for method in ("GET", "HEAD"):
            assert (await site.ask(method, f"{site.prefix}links/{name}")).status_code == 404
    assert (await site.ask("PUT", f"{site.prefix}links/folder/secret", content=b"x")).status_code == 409
    assert (await site.ask("PUT", f"{site.prefix}links/file", content=b"mine")).status_code == 200
    assert await site.objects.delete_under(f"{site.objects.root}/{site.prefix}links/") == 3
    assert secret.read_bytes() == b"secret"


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Co"]), min_size=1, max_size=40))
def test_every_valid_key_maps_to_one_path_below_the_root(text: str) -> None:
    try:
        key = canonical_key(text)
    except BadRequest:
        return
    root = Path("/root/of/objects")
    assert key == text
    assert os.path.normpath(root / key) == f"{root}/{key}"
    assert not key.startswith("_uploads/")
    assert not any(ord(character) < 32 or character in "\\%" for character in key)


@given(
    st.lists(
        st.sampled_from(["..", ".", "", "a", "%2e", FULLWIDTH_DOTS, DOT_LEADERS, "\\", "a\\..", "_uploads"]),
        min_size=1,
        max_size=6,
    )
)
def test_path_with_a_dot_segment_is_refused(segments: list[str]) -> None:
    if all(segment in ("a", "_uploads") for segment in segments) and segments[0] == "a":
        assert canonical_key("/".join(segments))
        return
    with pytest.raises(BadRequest):
        canonical_key("/".join(segments))


def test_listing_is_ordered_and_continues_after_any_key(tmp_path: Path) -> None:
    names = ["a-b", "a/b!", "a/b/c", "a/z", "a0", "b", "é/x"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    tree = Tree(tmp_path)
    assert [key for key, _ in tree.files([], "")] == names
    for position, name in enumerate(names):
        assert [key for key, _ in tree.files([], name)] == names[position + 1 :]
    assert [key for key, _ in tree.files([], "a/b/bbb")] == names[2:]


# Object tokens


async def test_object_token_reaches_only_its_own_prefix(site: ObjectGateway) -> None:
    beside = site.prefix.rstrip("/")
    for key in (f"{beside}x/a", f"{beside[:-1]}9/a", "elsewhere/a", f"dataset/{DATASET}/a"):
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            assert (await site.ask(method, key)).status_code == 403
        assert (await site.ask("POST", key, "?uploads")).status_code == 403
    assert site.uploads() == []


@pytest.mark.parametrize("credential", ["", "Bearer", "Bearer x", "Bearer a.b.c", "Basic eDp5", "Bearer ilk_a_b"])
async def test_only_object_tokens_give_access_to_objects(site: ObjectGateway, key: str, credential: str) -> None:
    await site.put(key, b"x")
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        reply = await site.ask(method, key, headers={"Authorization": credential})
        assert reply.status_code == 401
    capability = site.claim["capability_token"]
    assert (await site.ask("GET", key, headers={"Authorization": f"Bearer {capability}"})).status_code == 401


async def test_signed_url_with_another_credential_is_refused(site: ObjectGateway, key: str) -> None:
    await site.put(key, b"x")
    url = await site.objects.sign("GET", site.objects.uri(key), 60)
    reply = await site.system.http.get(url, headers={"Authorization": f"Bearer {site.token}"})
    assert reply.status_code == 401


async def test_put_that_outlasts_its_lease_creates_no_object(still: System, clock: ManualClock) -> None:
    slow = await _site(still)
    key = slow.new_key()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"before"
        await eventually(lambda: slow.uploads() or None)
        await still.user("POST", f"/v1/tasks/{slow.claim['task_id']}/cancel")
        clock.advance(3)
        yield b"after"

    reply = await slow.ask("PUT", key, content=chunks())
    assert (reply.status_code, reply.json()["code"]) == (401, "token_expired")
    assert slow.files() == set()
    assert slow.uploads() == []


async def test_ended_attempt_cannot_write(still: System) -> None:
    over = await _site(still)
    written, in_parts = over.new_key(), over.new_key()
    await over.put(written, b"committed")
    upload = await over.begin(in_parts)
    part = await over.put_part(in_parts, upload, 1, b"part")
    await still.complete(over.claim)
    replies = [await over.ask("PUT", written, content=b"exchanged"), await over.complete(in_parts, upload, [part])]
    assert [(reply.status_code, reply.json()["code"]) for reply in replies] == [(401, "token_expired")] * 2
    assert over.files() == {written}


async def test_object_token_lists_its_prefix_in_pages(site: ObjectGateway) -> None:
    folder = f"{site.prefix}{uuid4()}/"
    names = [f"{folder}{name}" for name in ("a", "b/c", "b/d", "e")]
    for name in names:
        await site.put(name, b"x")
    seen, cursor = [], ""
    while True:
        page = await _listed(site, prefix=folder, limit=3, **({"cursor": cursor} if cursor else {}))
        seen += [one["key"] for one in page["objects"]]
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert seen == names


@pytest.mark.parametrize("prefix", ["", "elsewhere/", "dataset/", "_uploads/", "../"])
async def test_listing_outside_the_prefix_of_the_token_is_refused(site: ObjectGateway, prefix: str) -> None:
    url, headers = f"{site.system.gateway_url}/v1/objects", {"Authorization": f"Bearer {site.token}"}
    reply = await site.system.http.get(url, params={"prefix": prefix}, headers=headers)
    assert reply.status_code in (400, 403), reply.text


async def test_listing_cursor_of_another_prefix_is_refused(site: ObjectGateway) -> None:
    url, headers = f"{site.system.gateway_url}/v1/objects", {"Authorization": f"Bearer {site.token}"}
    asked = {"prefix": site.prefix, "cursor": "elsewhere/a"}
    reply = await site.system.http.get(url, params=asked, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_cursor")


# Signatures


async def test_url_signature_has_one_spelling(site: ObjectGateway, key: str) -> None:
    urls = site.system.kernel.access.signed_urls
    query = parse_qsl(urlsplit(await urls.sign("GET", key, 60)).query)
    await urls.verify("GET", key, query)
    signature = dict(query)["signature"]
    for other in (
        _other_half(signature),
        f"{signature}=",
        f"{signature}==",
        f" {signature}",
        signature[:-1] + "B",
        "A" * 86,
    ):
        with pytest.raises(Unauthenticated):
            await urls.verify("GET", key, [*query[:-1], ("signature", other)])
    for changed in (query + query[:1], query[:-1], query[1:], [*query, ("x", "")], [*query[1:], ("expires", "+1")]):
        with pytest.raises(Unauthenticated):
            await urls.verify("GET", key, changed)


async def test_signed_url_ends_with_its_expiry_or_its_key(still: System, clock: ManualClock) -> None:
    urls, keyring = still.kernel.access.signed_urls, still.kernel.access.keyring
    short = parse_qsl(urlsplit(await urls.sign("GET", "a", 60)).query)
    long = parse_qsl(urlsplit(await urls.sign("GET", "a", 7 * 24 * 3600)).query)
    clock.advance(59)
    await urls.verify("GET", "a", short)
    clock.advance(2)
    with pytest.raises(Unauthenticated) as expired:
        await urls.verify("GET", "a", short)
    assert expired.value.code == "url_expired"
    await keyring.rotate()
    await urls.verify("GET", "a", long)
    assert dict(parse_qsl(urlsplit(await urls.sign("GET", "a", 60)).query))["kid"] != dict(long)["kid"]
    clock.advance(2 * still.kernel.settings.token_ttl_seconds + 1)
    with pytest.raises(Unauthenticated) as retired:
        await urls.verify("GET", "a", long)
    assert retired.value.code == "bad_signature"


async def test_signed_url_of_another_installation_is_refused(site: ObjectGateway, still: System, key: str) -> None:
    foreign = SignedUrls(still.kernel.access.keyring, site.system.kernel.stores.clock, base_url=site.system.gateway_url)
    reply = await site.system.http.get(await foreign.sign("GET", key, 60))
    assert (reply.status_code, reply.json()["code"]) == (401, "bad_signature")


async def test_gateway_serves_no_objects_if_they_are_in_s3(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, objects_url="s3://bucket/root") as system:
        url = await system.kernel.access.signed_urls.sign("GET", "a", 60)
        reply = await system.http.get(url)
    assert (reply.status_code, reply.json()["code"]) == (404, "objects_elsewhere")


async def _listed(site: ObjectGateway, **asked: Any) -> Any:
    url, headers = f"{site.system.gateway_url}/v1/objects", {"Authorization": f"Bearer {site.token}"}
    reply = await site.system.http.get(url, params=asked, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _other_half(signature: str) -> str:
    """Returns the second valid ECDSA signature of the same message, with `s` negated."""
    raw = base64.urlsafe_b64decode(signature + "==")
    other = (ORDER - int.from_bytes(raw[32:])).to_bytes(32)
    return base64.urlsafe_b64encode(raw[:32] + other).rstrip(b"=").decode()


def _address(site: ObjectGateway) -> tuple[str, int]:
    parts = urlsplit(site.system.gateway_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


async def _raw(site: ObjectGateway, method: str, target: str) -> int:
    """Sends the path unchanged, because HTTP clients normalise it, and returns the status."""
    reader, writer = await asyncio.open_connection(*_address(site))
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.token}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: 1\r\n\r\nx".encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


@contextmanager
def _disk_of(size: int) -> Iterator[None]:
    """Limits the size of every file of this process. A larger write fails like a write to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
