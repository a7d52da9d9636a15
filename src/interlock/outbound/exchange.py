"""Exchanges with servers that users choose: guarded connections, bounded in time and size.

A few kilobytes of gzip can expand to gigabytes, so decompression stops at the limit.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from interlock.outbound.guard import (
    Address,
    AddressRefused,
    BadReply,
    BadUrl,
    Binding,
    Guard,
    HostNotBound,
    NameUnknown,
    OutboundFailed,
    ProxyFailed,
    ReplyTooLarge,
    TlsFailed,
    TooManyRedirects,
    TooSlow,
    Unreachable,
)

ACCEPTED: Final = "gzip, deflate"
"""Value of the Accept-Encoding header."""

_GZIP: Final = 16 + zlib.MAX_WBITS


class Body(Protocol):
    def add(self, data: bytes) -> bool:
        """Adds a piece. Returns False once the limit is reached."""

    def end(self) -> bytes: ...


def body_of(encoding: str, limit: int, *, cut: bool) -> Body:
    """Returns a reader for a body with this Content-Encoding.

    If `cut` is true, the reader discards everything after `limit` bytes; otherwise it raises ReplyTooLarge.
    """
    name = encoding.strip().lower()
    if name in ("gzip", "x-gzip", "deflate"):
        return _Packed(name, _Bounded(limit, cut=cut))
    return _Bounded(limit, cut=cut)


class _Bounded:
    def __init__(self, limit: int, *, cut: bool) -> None:
        self._most, self._cut = limit, cut
        self._pieces: list[bytes] = []
        self.left = limit

    def add(self, data: bytes) -> bool:
        if len(data) > self.left and not self._cut:
            raise ReplyTooLarge(f"The response has more than {self._most} bytes, the limit.")
        whole = len(data) <= self.left
        self._pieces.append(data if whole else data[: self.left])
        self.left -= len(self._pieces[-1])
        return whole

    def end(self) -> bytes:
        return b"".join(self._pieces)


class _Packed:
    """Decompresses gzip with one or more members, and deflate with or without the zlib header."""

    def __init__(self, name: str, into: _Bounded) -> None:
        self._gzip, self._into = name != "deflate", into
        self._inflate: zlib._Decompress | None = None

    def add(self, data: bytes) -> bool:
        try:
            return self._unpack(data)
        except zlib.error:
            raise BadReply("The response body does not match its Content-Encoding.") from None

    def _unpack(self, data: bytes) -> bool:
        while data:
            inflate = self._next(data)
            # Asking for one byte more than fits shows whether there is more.
            if not self._into.add(inflate.decompress(data, self._into.left + 1)):
                self._inflate = None
                return False
            data = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        return True

    def _next(self, data: bytes) -> zlib._Decompress:
        """Returns the decompressor for these bytes. Several gzip members may follow each other."""
        if self._inflate is None or self._inflate.eof:
            bare = data[0] & 0x0F != zlib.DEFLATED
            self._inflate = zlib.decompressobj(_GZIP if self._gzip else -zlib.MAX_WBITS if bare else zlib.MAX_WBITS)
        return self._inflate

    def end(self) -> bytes:
        if self._inflate is not None and not self._inflate.eof:
            raise BadReply("The compressed response body is truncated.")
        return self._into.end()


KEEP_SECONDS: Final = 4.0
"""Servers commonly close connections that were idle for 5 s; a request must not race with that."""
_PIECE: Final = 1 << 16
_LONGEST_URL: Final = 8_000
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HARMLESS: Final = frozenset({"accept", "accept-language", "content-type", "user-agent"})
"""Headers that are kept on a redirect to another origin. Any other header may contain credentials."""


@dataclass(frozen=True)
class Request:
    url: str = field(repr=False)
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = field(default=None, repr=False)
    bindings: tuple[Binding, ...] = ()
    """Bindings of the secrets in the request: each must allow the host, also after a redirect."""
    secret_body: bool = False
    """True if the body contains a secret. Like most headers, such a body is not sent to another origin."""


@dataclass(frozen=True)
class Bounds:
    seconds: float = 30.0
    """Timeout for everything: name resolution, connections, redirects, the response."""
    reply_bytes: int = 1 << 20
    """Maximum size of the body, both compressed and decompressed."""
    cut: bool = False
    """If true, the rest of a larger body is not read; otherwise such a response is an error."""
    redirects: int = 0
    """Maximum number of redirects to follow, each checked like the first request; 0: return the redirect itself."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str] = field(repr=False)
    """By name in lower case; repeated headers are joined with commas."""
    body: bytes = field(repr=False)
    url: str = field(repr=False)
    """The URL after redirects."""


@dataclass(frozen=True)
class Proxy:
    """A forward proxy over plain HTTP. It gets absolute URLs for http://, and CONNECT for https://."""

    url: str = field(repr=False)
    trusted: bool = False
    """True for the operator's own proxy, which may have any address. Other proxies are checked like any host."""
    bindings: tuple[Binding, ...] = ()
    """Bindings of the secrets in `url`: each must allow the host of the proxy."""


class Sender:
    """Sends requests. Each exchange opens a new connection and checks its address.

    Without `tls`, the trust store of the system applies. With a `proxy`, a name that resolves here is checked here; the
    proxy resolves all others. The proxy decides which addresses it connects to.
    """

    def __init__(self, guard: Guard, *, proxy: Proxy | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._guard, self._proxy, self._tls = guard, proxy, tls

    async def send(self, request: Request, bounds: Bounds) -> Reply:
        """Raises OutboundFailed."""
        url = read_url(request.url)
        try:
            async with asyncio.timeout(bounds.seconds):
                return await self._follow(request, url, bounds)
        except TimeoutError:
            raise TooSlow(f"{url.host} did not send a complete response within {bounds.seconds:g} s.") from None

    async def _follow(self, request: Request, url: URL, bounds: Bounds) -> Reply:
        for _ in range(bounds.redirects + 1):
            reply = await self._exchange(request, url, bounds)
            location = reply.headers.get("location")
            if bounds.redirects == 0 or reply.status not in _REDIRECTS or not location:
                return reply
            target = _joined(url, location)
            request = _redirected(request, reply.status, same_origin=target.origin() == url.origin())
            url = target
        raise TooManyRedirects(f"{url.host} redirected more than {bounds.redirects} times.")

    async def _exchange(self, request: Request, url: URL, bounds: Bounds) -> Reply:
        self._check_bindings(request, url)
        try:
            async with (
                self._session(url) as session,
                session.request(
                    request.method,
                    url,
                    headers=_headers(request),
                    data=request.body,
                    allow_redirects=False,
                    proxy=None if self._proxy is None else URL(self._proxy.url),
                ) as response,
            ):
                return await _read(response, url, bounds)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(error, url.host) from None

    def _check_bindings(self, request: Request, url: URL) -> None:
        """Raises HostNotBound. A proxy chosen by a job can read requests that pass through it without TLS."""
        for binding in request.bindings:
            binding.check(str(url.raw_host), url.port or 0)
        if self._proxy is None:
            return
        proxy = _web_url(self._proxy.url)
        through = request.bindings if url.scheme == "http" and not self._proxy.trusted else ()
        for binding in (*self._proxy.bindings, *through):
            binding.check(str(proxy.raw_host), proxy.port or 0)

    @asynccontextmanager
    async def _session(self, url: URL) -> AsyncIterator[aiohttp.ClientSession]:
        async with self._open(await self._route(url), keep=False) as session:
            yield session

    async def _route(self, url: URL) -> _Route:
        host, port = str(url.raw_host), url.port or 0
        find = self._guard.addresses
        if self._proxy is not None:
            with suppress(NameUnknown):  # the proxy may resolve it
                await self._guard.addresses(host, port)
            proxy = _web_url(self._proxy.url)
            host, port = str(proxy.raw_host), proxy.port or 0
            find = self._guard.unchecked if self._proxy.trusted else self._guard.addresses
        route = _Route(host, lambda: find(host, port))
        await route.find()
        return route

    def _open(self, route: _Route, *, keep: bool) -> aiohttp.ClientSession:
        tls = self._tls or _system_trust()
        how: dict[str, Any] = {"keepalive_timeout": KEEP_SECONDS, "limit": 0} if keep else {"force_close": True}
        connector = aiohttp.TCPConnector(resolver=route, use_dns_cache=False, socket_factory=route.open, ssl=tls, **how)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )


class KeptSender(Sender):
    """Keeps connections open between exchanges, for callers that contact one server often. Bound to one event loop.

    Names are resolved and addresses checked for each new connection. An open connection stays at its checked address.
    """

    def __init__(self, guard: Guard, *, proxy: Proxy | None = None, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(guard, proxy=proxy, tls=tls)
        self._kept: dict[URL, aiohttp.ClientSession] = {}
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def _session(self, url: URL) -> AsyncIterator[aiohttp.ClientSession]:
        async with self._opening:
            if url.origin() not in self._kept:
                self._kept[url.origin()] = self._open(await self._fresh_route(url), keep=True)
        yield self._kept[url.origin()]

    async def _fresh_route(self, url: URL) -> _Route:
        route = await self._route(url)
        route.find_again = True
        return route

    async def close(self) -> None:
        while self._kept:
            await self._kept.popitem()[1].close()


class _Route(AbstractResolver):
    """Restricts the connections of one session to checked addresses, in the resolver and when opening the socket."""

    def __init__(self, host: str, find: Callable[[], Awaitable[list[Address]]]) -> None:
        self._host, self._find = host, find
        self._addresses: list[Address] = []
        self.find_again = False
        """If true, each connection resolves again, since the name may point elsewhere by then."""

    async def find(self) -> None:
        """Resolves and checks the host. Raises AddressRefused, NameUnknown."""
        self._addresses = await self._find()

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_INET,  # noqa: ARG002 - aiohttp's value for "any family"
    ) -> list[ResolveResult]:
        if host.lower() != self._host.lower():
            raise AddressRefused(f"{host} was not checked.")
        if self.find_again:
            await self.find()
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass

    def open(self, info: tuple[Any, ...]) -> socket.socket:
        """Opens a socket. `info` is a tuple from getaddrinfo."""
        family, kind, protocol, _, where = info
        if str(where[0]) not in map(str, self._addresses):
            raise AddressRefused(f"{self._host} was not checked at this address.")
        return socket.socket(family, kind, protocol)


@cache
def _system_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


_NO_WEB_URL: Final = "A URL must start with http:// or https:// and have a host."


def _web_url(text: str) -> URL:
    if len(text) > _LONGEST_URL or re.search(r"[\x00-\x20\x7f\\]", text):
        raise BadUrl(f"A URL must not contain spaces or backslashes, or have more than {_LONGEST_URL} characters.")
    try:
        url = URL(text).with_fragment(None)
        is_web = url.scheme in ("http", "https") and bool(url.raw_host and url.port)
    except ValueError:
        raise BadUrl(_NO_WEB_URL) from None
    if not is_web:
        raise BadUrl(_NO_WEB_URL)
    return url


def read_url(text: str) -> URL:
    """Parses a URL without credentials. Raises BadUrl."""
    url = _web_url(text)
    if url.raw_user is not None or url.raw_password is not None:
        raise BadUrl("A URL must not contain a user or a password; put them into a header.")
    return url


def _joined(url: URL, location: str) -> URL:
    try:
        return read_url(str(url.join(URL(location))))
    except (BadUrl, ValueError):
        raise BadReply(f"{url.host} redirects to an invalid URL; only http and https are supported.") from None


def _redirected(request: Request, status: int, *, same_origin: bool) -> Request:
    """Builds the request for a redirect. Like browsers, drops the body and uses GET except for 307 and 308."""
    again = status in (307, 308) or request.method in ("GET", "HEAD")
    dropped = set() if again else {"content-type"}
    headers = {
        name: value
        for name, value in request.headers.items()
        if name.lower() not in dropped and (same_origin or name.lower() in _HARMLESS)
    }
    if again and request.secret_body and request.body is not None and not same_origin:
        raise HostNotBound(
            "The server redirected the request to another origin, and its body contains a secret, so it was not sent "
            "there: use the final URL in the payload."
        )
    if again:
        return replace(request, headers=headers)
    return replace(request, method="GET", headers=headers, body=None)


def _headers(request: Request) -> dict[str, str]:
    own = {"accept": "*/*", "accept-encoding": ACCEPTED, "user-agent": "interlock"}
    return own | {name.lower(): value for name, value in request.headers.items()}


async def _read(response: aiohttp.ClientResponse, url: URL, bounds: Bounds) -> Reply:
    headers: dict[str, str] = {}
    for name, value in response.headers.items():
        headers[name.lower()] = f"{headers[name.lower()]}, {value}" if name.lower() in headers else value
    body = body_of(headers.get("content-encoding", ""), bounds.reply_bytes, cut=bounds.cut)
    async for piece in response.content.iter_chunked(_PIECE):
        if not body.add(piece):
            break
    return Reply(response.status, headers, body.end(), str(url))


def _failure(error: Exception, host: str | None) -> OutboundFailed:
    match error:
        case aiohttp.ClientHttpProxyError():
            return ProxyFailed(f"The proxy returned {error.status} for {host}.")
        case aiohttp.ClientProxyConnectionError():
            return ProxyFailed(f"Cannot connect to the proxy ({_reason(error.os_error)}).")
        case aiohttp.ClientConnectorCertificateError():
            return TlsFailed(
                f"The certificate of {host} is not trusted ({_reason(error.certificate_error)}).", untrusted=True
            )
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return TlsFailed(f"The TLS handshake with {host} failed.")
        case aiohttp.ClientConnectorError():
            return Unreachable(f"Cannot connect to {host} ({_reason(error.os_error)}).")
        case aiohttp.ClientConnectionError() | OSError():
            return Unreachable(f"{host} closed the connection before it responded.", broke_off=True)
    return _bad(error, host)


def _bad(error: Exception, host: str | None) -> OutboundFailed:
    if isinstance(error, aiohttp.InvalidURL):
        return BadUrl("The URL is invalid.")
    if isinstance(error, aiohttp.ClientError):
        return BadReply(f"The response of {host} is truncated or is not valid HTTP.")
    return BadUrl("The request cannot be encoded as HTTP.")


def _reason(error: Exception) -> str:
    return str(getattr(error, "verify_message", None) or getattr(error, "strerror", None) or type(error).__name__)
