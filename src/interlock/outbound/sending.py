"""Exchanges with somebody else's server: connected to a checked address, bounded in time and in size."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from interlock.outbound.addresses import Address
from interlock.outbound.bindings import Binding
from interlock.outbound.bodies import ACCEPTED, body_of
from interlock.outbound.failures import (
    AddressRefused,
    BadReply,
    BadUrl,
    NameUnknown,
    OutboundFailed,
    ProxyFailed,
    TlsFailed,
    TooManyRedirects,
    TooSlow,
    Unreachable,
)
from interlock.outbound.guard import Guard

KEEP_SECONDS: Final = 4.0
"""Servers commonly close a connection that was idle for five: a request must not race with that."""
_PIECE: Final = 1 << 16
_LONGEST_URL: Final = 8_000
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HARMLESS: Final = frozenset({"accept", "accept-language", "content-type", "user-agent"})
"""Headers that go along when a redirect leads to another origin. What else there is may be a credential."""


@dataclass(frozen=True)
class Request:
    url: str = field(repr=False)
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: bytes | None = field(default=None, repr=False)
    bindings: tuple[Binding, ...] = ()
    """Of the secrets in it: each must allow the host, after a redirect, too."""


@dataclass(frozen=True)
class Bounds:
    seconds: float = 30.0
    """For everything: names, connections, redirects, the reply."""
    reply_bytes: int = 1 << 20
    """Of the body, as sent and unpacked."""
    cut: bool = False
    """What is beyond `reply_bytes` is left unread; else such a reply is refused."""
    redirects: int = 0
    """That are followed, each hop checked like the first; 0: a redirect is a reply like any other."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str] = field(repr=False)
    """By name in lower case; one that is there twice is joined by commas."""
    body: bytes = field(repr=False)
    url: str = field(repr=False)
    """Where it came from in the end."""


@dataclass(frozen=True)
class Proxy:
    """A forward proxy over plain HTTP: it is asked for http:// by whole URLs, and for https:// by CONNECT."""

    url: str = field(repr=False)
    trusted: bool = False
    """The installation's own: it may be anywhere. One that somebody else names is checked like any address."""
    bindings: tuple[Binding, ...] = ()
    """Of the secrets in `url`: each must allow the proxy's host."""


class Sender:
    """Keeps nothing between two exchanges: each connection is new, and its address checked.

    `tls` stands for the system's trust. With a `proxy` a name is checked as it is seen from here, and left to the proxy
    if it is not known here: what the proxy itself then reaches is for the proxy to decide.
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
            raise TooSlow(f"{url.host} has not answered in full within {bounds.seconds:g} s.") from None

    async def _follow(self, request: Request, url: URL, bounds: Bounds) -> Reply:
        for _ in range(bounds.redirects + 1):
            reply = await self._exchange(request, url, bounds)
            location = reply.headers.get("location")
            if bounds.redirects == 0 or reply.status not in _REDIRECTS or not location:
                return reply
            target = _joined(url, location)
            request = _redirected(request, reply.status, same_origin=target.origin() == url.origin())
            url = target
        raise TooManyRedirects(f"{url.host} still redirects after {bounds.redirects} redirects.")

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
        """Raises HostNotBound. A proxy that a job names reads what goes through it without TLS."""
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
            with suppress(NameUnknown):  # the proxy may know it
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
    """Keeps connections open between exchanges, for those who ask one server often. Used by one event loop.

    Names are resolved, and addresses checked, for each connection that is opened: a kept one stays at the address that
    was checked.
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
    """Where connections of one session may go, asked at both places where a client could go astray: name and socket."""

    def __init__(self, host: str, find: Callable[[], Awaitable[list[Address]]]) -> None:
        self._host, self._find = host, find
        self._addresses: list[Address] = []
        self.find_again = False
        """For each connection, since the name may lead elsewhere by then."""

    async def find(self) -> None:
        """Raises AddressRefused, NameUnknown."""
        self._addresses = await self._find()

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_INET,  # noqa: ARG002 - the client's word for "all of them"
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
        """Any: what getaddrinfo gives."""
        family, kind, protocol, _, where = info
        if str(where[0]) not in map(str, self._addresses):
            raise AddressRefused(f"{self._host} was not checked at this address.")
        return socket.socket(family, kind, protocol)


@cache
def _system_trust() -> ssl.SSLContext:
    return ssl.create_default_context()


def _web_url(text: str) -> URL:
    if len(text) > _LONGEST_URL or re.search(r"[\x00-\x20\x7f\\]", text):
        raise BadUrl(f"A URL has no spaces, no backslashes and at most {_LONGEST_URL} characters.")
    try:
        url = URL(text)
        if url.scheme in ("http", "https") and url.raw_host and url.port:
            return url.with_fragment(None)
    except ValueError:
        pass  # it is told apart below
    raise BadUrl("A URL begins with http:// or https:// and a host.")


def read_url(text: str) -> URL:
    """Raises BadUrl."""
    url = _web_url(text)
    if url.raw_user is not None or url.raw_password is not None:
        raise BadUrl("A URL holds no user and no password: they belong into a header.")
    return url


def _joined(url: URL, location: str) -> URL:
    try:
        return read_url(str(url.join(URL(location))))
    except (BadUrl, ValueError):
        raise BadReply(f"{url.host} redirects to what is no URL of http or https.") from None


def _redirected(request: Request, status: int, *, same_origin: bool) -> Request:
    """As browsers do it: but for 307 and 308, what was posted is not posted again."""
    again = status in (307, 308) or request.method in ("GET", "HEAD")
    dropped = set() if again else {"content-type"}
    headers = {
        name: value
        for name, value in request.headers.items()
        if name.lower() not in dropped and (same_origin or name.lower() in _HARMLESS)
    }
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
            return ProxyFailed(f"The proxy answers {error.status} when it is asked for {host}.")
        case aiohttp.ClientProxyConnectionError():
            return ProxyFailed(f"There is no connection to the proxy ({_reason(error.os_error)}).")
        case aiohttp.ClientConnectorCertificateError():
            return TlsFailed(
                f"The certificate of {host} is not trusted ({_reason(error.certificate_error)}).", untrusted=True
            )
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return TlsFailed(f"{host} speaks no TLS that is understood here.")
        case aiohttp.ClientConnectorError():
            return Unreachable(f"There is no connection to {host} ({_reason(error.os_error)}).")
        case aiohttp.ClientConnectionError() | OSError():
            return Unreachable(f"{host} broke the connection off before it answered.", broke_off=True)
    return _bad(error, host)


def _bad(error: Exception, host: str | None) -> OutboundFailed:
    if isinstance(error, aiohttp.InvalidURL):
        return BadUrl("This is no URL that can be asked for.")
    if isinstance(error, aiohttp.ClientError):
        return BadReply(f"What {host} answers ends before its end, or is no HTTP.")
    return BadUrl("This cannot be said in HTTP.")


def _reason(error: Exception) -> str:
    return str(getattr(error, "verify_message", None) or getattr(error, "strerror", None) or type(error).__name__)
