"""Outbound requests: the addresses that may be reached, and protection against hostile servers."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import ConfigurationError
from interlock.outbound import Exceptions, Guard
from interlock.outbound.exchange import Bounds, KeptSender, Proxy, Reply, Request, Sender, _Route
from interlock.outbound.guard import (
    Address,
    AddressRefused,
    BadReply,
    BadUrl,
    NameUnknown,
    OutboundFailed,
    ProxyFailed,
    ReplyTooLarge,
    TlsFailed,
    TooManyRedirects,
    TooSlow,
    Unreachable,
    why_refused,
)
from interlock.settings import load
from tests.support.third_party_servers import NAME, SILENCE, Stranger, answer, chunked, identity, stranger

HERE = Exceptions.read(["127.0.0.1"])
PUBLIC = "93.184.215.14"
FOLLOW = Bounds(seconds=10, redirects=5)


class Names:
    """A resolver with prepared answers: it returns them in order, and repeats the last one."""

    def __init__(self, **names: list[list[str]]) -> None:
        self._names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self._names.get(host)
        if answers is None:
            raise OSError(-2, "Name or service not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
async def there() -> AsyncIterator[Stranger]:
    async with stranger() as started:
        yield started


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return identity(tmp_path_factory.mktemp("identity") / "stranger.pem")


async def ask(url: str, bounds: Bounds = FOLLOW, *, guard: Guard | None = None, **request: Any) -> Reply:
    return await Sender(guard or Guard(HERE)).send(Request(url, **request), bounds)


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.1", "10.0.0.1", "100.64.0.1", "100.127.255.254", "127.0.0.1", "127.8.8.8", "169.254.169.254"),
        *("172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1"),
        *("198.51.100.7", "203.0.113.9", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::1"),
        *("2002:7f00:1::", "2002:808:808::1", "2001::1", "2001:db8::1", "fc00::1", "fd00:ec2::254", "fe80::1"),
        *("fe80::1%eth0", "fec0::1", "ff02::1", "100::1", "3fff::1", "5f00::1", "4000::1"),
    ],
)
def test_non_public_address_is_refused(address: str) -> None:
    assert why_refused(ip_address(address)) is not None


@pytest.mark.parametrize("address", ["8.8.8.8", PUBLIC, "172.15.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1"])
def test_public_address_is_allowed(address: str) -> None:
    assert why_refused(ip_address(address)) is None


@given(st.ip_addresses(v=4))
def test_ipv4_address_embedded_in_ipv6_is_refused(address: IPv4Address) -> None:
    for disguise in (0xFFFF << 32, 0, 0x64FF9B << 96, 0x64FF9B0001 << 80):
        assert why_refused(IPv6Address(disguise | int(address))) is not None
    assert why_refused(IPv6Address((0x2002 << 112) | (int(address) << 80))) is not None


@given(st.ip_addresses())
def test_any_non_global_address_is_refused(address: IPv4Address | IPv6Address) -> None:
    assert address.is_global or why_refused(address) is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "[::1]",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "[::ffff:127.0.0.1]",
        "LocalHost.",
    ],
)
async def test_loopback_is_refused_in_every_spelling(host: str, there: Stranger) -> None:
    with pytest.raises((AddressRefused, NameUnknown, BadUrl)):
        await ask(there.url("/", host), guard=Guard())
    assert there.asked == []


@pytest.mark.parametrize("addresses", [["10.0.0.1"], [PUBLIC, "10.0.0.1"], ["10.0.0.1", PUBLIC], ["fd00::1", PUBLIC]])
async def test_name_with_one_refused_address_is_refused(addresses: list[str]) -> None:
    guard = Guard(resolve=Names(some_test=[addresses]))
    with pytest.raises(AddressRefused, match=r"some\.test resolves to an address that is private.*outbound_allow"):
        await guard.addresses("some.test", 80)


async def test_exceptions_may_be_networks_names_or_domains() -> None:
    names = Names(a_test=[["10.1.2.3"]], b_hooks_test=[["10.9.9.9"]], hooks_test=[["10.9.9.9"]], c_test=[["10.2.2.3"]])
    guard = Guard(Exceptions.read(["10.1.0.0/16", "*.hooks.test"]), resolve=names)
    assert await guard.addresses("a.test", 80) == [ip_address("10.1.2.3")]
    assert await guard.addresses("B.Hooks.test".lower(), 80) == [ip_address("10.9.9.9")]
    for refused in ("hooks.test", "c.test"):
        with pytest.raises(AddressRefused):
            await guard.addresses(refused, 80)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"outbound_allow": ["http://a.test"]}, "without scheme"),
        ({"outbound_allow": ["10.0.0.1/8"]}, "is not an address"),
        ({"outbound_allow": ["a.test:0"]}, "is not an address"),
        ({"outbound_allow": ["10.0.0.0/8:80"]}, "is not an address"),
        ({"outbound_ports": [0]}, "1 to 65535"),
        ({"outbound_proxy": "https://proxy:3128"}, "http://host:port"),
    ],
)
def test_invalid_exception_setting_stops_the_start_with_advice(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        load(**given)


async def test_unlisted_port_is_refused(there: Stranger) -> None:
    with pytest.raises(AddressRefused, match="443"):
        await ask(there.url("/"), guard=Guard(HERE, ports=[443]))


async def test_dns_rebinding_does_not_change_the_checked_address(there: Stranger) -> None:
    names = Names(moves_test=[["127.0.0.1"], ["127.0.0.2"]])
    guard = Guard(HERE, resolve=names)
    there.says("/", answer(b"hello"))
    assert (await ask(there.url("/", "moves.test"), guard=guard)).body == b"hello"
    assert names.asked == ["moves.test"]
    assert there.asked[0].headers["host"] == f"moves.test:{there.port}"
    with pytest.raises(AddressRefused):
        await ask(there.url("/", "moves.test"), guard=guard)
    assert len(there.asked) == 1


async def test_only_the_checked_name_and_address_can_be_connected_to() -> None:
    """Holds for anything that the client library does between the check and the connection."""

    async def found() -> list[Address]:
        return [ip_address(PUBLIC)]

    route = _Route("hooks.example", found)
    await route.find()
    assert [each["host"] for each in await route.resolve("Hooks.Example", 443)] == [PUBLIC]
    with pytest.raises(AddressRefused):
        await route.resolve("elsewhere.example", 443)
    for other in ("169.254.169.254", "127.0.0.1", "93.184.215.15"):
        with pytest.raises(AddressRefused):
            route.open((socket.AF_INET, socket.SOCK_STREAM, 0, "", (other, 443)))
    route.open((socket.AF_INET, socket.SOCK_STREAM, 0, "", (PUBLIC, 443))).close()


async def test_every_redirect_hop_is_checked(there: Stranger) -> None:
    names = Names(moves_test=[["127.0.0.1"], ["127.0.0.2"]])
    there.says("/", answer(status=302, location="/there"))
    with pytest.raises(AddressRefused):
        await ask(there.url("/", "moves.test"), guard=Guard(HERE, resolve=names))
    assert there.targets() == ["/"]


async def test_reused_sender_checks_the_name_for_each_connection(there: Stranger) -> None:
    """The server of this test closes each connection, so that the second exchange needs a new one."""
    names = Names(moves_test=[["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2"]])
    there.says("/", answer(b"first"))
    sender = KeptSender(Guard(HERE, resolve=names))
    try:
        assert (await sender.send(Request(there.url("/", "moves.test")), FOLLOW)).body == b"first"
        with pytest.raises(AddressRefused):
            await sender.send(Request(there.url("/", "moves.test")), FOLLOW)
    finally:
        await sender.close()
    assert there.targets() == ["/"]


async def test_exception_with_a_port_allows_only_that_port() -> None:
    guard = Guard(
        Exceptions.read(["10.0.0.1:8545", "[fd00::1]:8545", "node.test:8545"]), resolve=Names(node_test=[["10.9.9.9"]])
    )
    for host in ("10.0.0.1", "fd00::1", "node.test"):
        assert await guard.addresses(host, 8545)
        with pytest.raises(AddressRefused):
            await guard.addresses(host, 5432)


@pytest.mark.parametrize("where", ["http://127.0.0.1:{port}/secret", "http://169.254.169.254/latest", "//10.0.0.1/"])
async def test_redirect_to_a_refused_address_is_not_followed(where: str, there: Stranger) -> None:
    guard = Guard(Exceptions.read(["open.test"]), resolve=Names(open_test=[["127.0.0.1"]]))
    there.says("/", answer(status=302, location=where.format(port=there.port)))
    with pytest.raises(AddressRefused):
        await ask(there.url("/", "open.test"), guard=guard)
    assert there.targets() == ["/"]


@pytest.mark.parametrize("where", ["file:///etc/passwd", "gopher://127.0.0.1/", "http://u:p@127.0.0.1/", "http://["])
async def test_redirect_to_an_invalid_url_is_a_bad_reply(where: str, there: Stranger) -> None:
    there.says("/", answer(status=301, location=where))
    with pytest.raises(BadReply, match="redirects to an invalid URL"):
        await ask(there.url("/"))


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://a.test/",
            "file:///etc/passwd",
            "//a.test",
            "http://",
            "http://u:p@a.test/",
            "http://a.test:0/",
            "a b",
        ),
        *("http://a.test/\r\nX: y", "http://a.test:99999/", "http://a\\@b/", "http://a.test/" + "x" * 8000),
    ],
)
async def test_invalid_url_is_refused_without_a_request(url: str) -> None:
    with pytest.raises(BadUrl):
        await ask(url)


# Redirects


async def test_redirects_are_followed_only_on_request(there: Stranger) -> None:
    there.says("/", answer(status=307, location="next?x=1#part"))
    there.says("/next", answer(b"arrived"))
    reply = await ask(there.url("/"))
    assert (reply.status, reply.body, reply.url) == (200, b"arrived", there.url("/next?x=1"))
    assert (await ask(there.url("/"), Bounds())).status == 307


async def test_redirect_loop_is_limited(there: Stranger) -> None:
    there.says("/", answer(status=302, location="/"))
    with pytest.raises(TooManyRedirects):
        await ask(there.url("/"))
    assert len(there.asked) == FOLLOW.redirects + 1


@pytest.mark.parametrize(("status", "method", "body"), [(303, "GET", b""), (302, "GET", b""), (307, "POST", b"data")])
async def test_post_is_repeated_only_by_307_and_308(status: int, method: str, body: bytes, there: Stranger) -> None:
    there.says("/", answer(status=status, location="/next"))
    await ask(there.url("/"), method="POST", body=b"data", headers={"Content-Type": "text/plain"})
    last = there.asked[-1]
    assert (last.method, last.target, last.body) == (method, "/next", body)
    assert ("text/plain" in last.headers.get("content-type", "")) == bool(body)


async def test_credentials_are_not_sent_to_another_origin(there: Stranger) -> None:
    async with stranger() as other:
        there.says("/", answer(status=302, location="/here"))
        there.says("/here", answer(status=302, location=other.url("/")))
        await ask(there.url("/"), headers={"Authorization": "Bearer x", "X-Key": "y", "Accept-Language": "de"})
    assert [one.headers.get("authorization") for one in [*there.asked, *other.asked]] == ["Bearer x", "Bearer x", None]
    assert "x-key" not in other.asked[0].headers
    assert other.asked[0].headers["accept-language"] == "de"


# Hostile servers


async def test_silent_server_times_out(there: Stranger) -> None:
    there.says("/", SILENCE)
    with pytest.raises(TooSlow, match=r"0\.05 s"):
        await ask(there.url("/"), Bounds(seconds=0.05))


@pytest.mark.parametrize(
    "said",
    [
        answer(b"x" * 5_000),
        chunked([b"x" * 1_000] * 5),
        answer(gzip.compress(b"x" * 5_000), content_encoding="gzip"),
        answer(zlib.compress(b"x" * 5_000), content_encoding="deflate"),
    ],
)
async def test_oversized_reply_is_refused_or_truncated(said: bytes, there: Stranger) -> None:
    there.says("/", said)
    with pytest.raises(ReplyTooLarge, match="more than 4999 bytes"):
        await ask(there.url("/"), Bounds(reply_bytes=4_999))
    assert len((await ask(there.url("/"), Bounds(reply_bytes=5_000))).body) == 5_000
    assert (await ask(there.url("/"), Bounds(reply_bytes=100, cut=True))).body == b"x" * 100


async def test_gzip_bomb_is_decompressed_only_up_to_the_limit(there: Stranger) -> None:
    bomb = gzip.compress(bytes(64 << 20), compresslevel=1)
    assert len(bomb) < 1 << 20
    there.says("/", answer(bomb, content_encoding="gzip"))
    with pytest.raises(ReplyTooLarge):
        await ask(there.url("/"), Bounds(reply_bytes=8 << 20))


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "capitals": ("GZip", gzip.compress),
    "members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", lambda data: zlib.compress(data)[2:-4]),
    "unknown": ("br", lambda data: data),
    "identity": ("identity", lambda data: data),
}


@pytest.mark.parametrize("packing", PACKED)
async def test_compressed_reply_is_decompressed(packing: str, there: Stranger) -> None:
    name, pack = PACKED[packing]
    said = b"what was said, " * 9_000
    packed = pack(said)
    there.says("/", chunked([packed[at : at + 1_000] for at in range(0, len(packed), 1_000)]).replace(
        b"Connection: close", b"Connection: close\r\nContent-Encoding: " + name.encode()
    ))  # fmt: skip
    assert (await ask(there.url("/"))).body == said


@pytest.mark.parametrize(
    "said",
    [
        answer(b"short", content_length="50"),
        chunked([b"one", b"two"], whole=False),
        answer(gzip.compress(b"x" * 5_000)[:-9], content_encoding="gzip"),
        answer(b"not packed at all", content_encoding="gzip"),
        answer(b"", x_long="x" * 100_000),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 Said\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_truncated_and_invalid_replies_are_distinguished(said: bytes, there: Stranger) -> None:
    there.says("/", said)
    with pytest.raises(BadReply):
        await ask(there.url("/"))


async def test_closed_port_or_connection_is_unreachable(there: Stranger) -> None:
    there.says("/", b"\r\n")
    for url in (there.url("/"), "http://127.0.0.1:1/"):
        with pytest.raises(Unreachable):
            await ask(url)


async def test_unknown_name_has_its_own_error() -> None:
    with pytest.raises(NameUnknown, match=r"nobody\.test cannot be resolved \(Name or service not known\)"):
        await ask("http://nobody.test/", guard=Guard(resolve=Names()))


async def test_error_message_never_contains_the_path(there: Stranger) -> None:
    there.says("/key-123", answer(b"x" * 100), SILENCE, b"bad")
    for bounds in (Bounds(reply_bytes=1), Bounds(seconds=0.05), Bounds()):
        with pytest.raises(OutboundFailed) as failed:
            await ask(there.url("/key-123?token=456"), bounds)
        assert "key-123" not in str(failed.value)
        assert "456" not in str(failed.value)


# TLS


async def test_certificate_is_checked_by_name_on_the_checked_address(pem: Path) -> None:
    guard = Guard(HERE, resolve=Names(stranger_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]]))
    trust = ssl.create_default_context(cafile=str(pem))
    async with stranger(pem) as secure:
        secure.says("/", answer(b"secret"))
        reply = await Sender(guard, tls=trust).send(Request(secure.url("/", NAME)), FOLLOW)
        assert (reply.body, secure.named) == (b"secret", [NAME])
        with pytest.raises(TlsFailed, match="not trusted"):
            await Sender(guard, tls=trust).send(Request(secure.url("/", "other.test")), FOLLOW)
        with pytest.raises(TlsFailed, match="not trusted"):
            await Sender(guard).send(Request(secure.url("/", NAME)), FOLLOW)


async def test_server_without_tls_has_its_own_error() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.test ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        with pytest.raises(TlsFailed, match=r"TLS handshake with .* failed"):
            await ask(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")


# A forward proxy


def through(proxy: Stranger, *, trusted: bool = True, guard: Guard | None = None, **more: Any) -> Sender:
    return Sender(
        guard or Guard(resolve=Names()), proxy=Proxy(f"http://me:secret@127.0.0.1:{proxy.port}", trusted), **more
    )


async def test_proxy_gets_the_full_url_for_plain_http(there: Stranger) -> None:
    there.says("http://inside.test/page", answer(b"from afar"))
    reply = await through(there).send(Request("http://inside.test/page?q=1", headers={"X-A": "b"}), FOLLOW)
    (asked,) = there.asked
    assert (reply.body, asked.target) == (b"from afar", "http://inside.test/page?q=1")
    assert (asked.headers["host"], asked.headers["x-a"]) == ("inside.test", "b")
    assert asked.headers["proxy-authorization"] == "Basic bWU6c2VjcmV0"


async def test_proxy_tunnels_https_without_seeing_its_content(there: Stranger, pem: Path) -> None:
    async with stranger(pem) as secure:
        secure.says("/key", answer(b"secret"))
        there.tunnels[f"{NAME}:443"] = secure.port
        sender = through(there, tls=ssl.create_default_context(cafile=str(pem)))
        reply = await sender.send(Request(f"https://{NAME}/key", headers={"X-Key": "k"}), FOLLOW)
    assert (reply.body, secure.named, there.targets()) == (b"secret", [NAME], [f"{NAME}:443"])
    assert "x-key" not in there.asked[0].headers
    assert "proxy-authorization" not in secure.asked[0].headers


async def test_proxy_does_not_bypass_the_address_check(there: Stranger) -> None:
    names = Names(inside_test=[["10.0.0.1"]])
    for url in ("http://127.0.0.1/", "http://169.254.169.254/latest", "https://inside.test/"):
        with pytest.raises(AddressRefused):
            await through(there, guard=Guard(resolve=names)).send(Request(url), FOLLOW)
    with pytest.raises(AddressRefused):
        await through(there, trusted=False).send(Request("http://public.test/"), FOLLOW)
    assert there.asked == []


async def test_refusing_and_unreachable_proxies_are_distinguished(there: Stranger) -> None:
    with pytest.raises(ProxyFailed, match="403"):
        await through(there).send(Request("https://closed.test/"), FOLLOW)
    with pytest.raises(ProxyFailed, match="Cannot connect to the proxy"):
        await through(Stranger(port=1)).send(Request("http://public.test/"), FOLLOW)
