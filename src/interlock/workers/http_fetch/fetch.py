"""One attempt: waits for a permit of the host, sends the request, and retries after the time in Retry-After."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import math
import os
import stat
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from interlock.outbound.exchange import Bounds, Reply, Request, Sender, read_url
from interlock.outbound.guard import OutboundFailed
from interlock.workers.context import TaskFailed, plain
from interlock.workers.http_fetch.config import FetchConfig

_FIRST_FAILURE: Final = 400
_TOO_MANY: Final = 429
_SHORTEST_HOLD_SECONDS: Final = 0.05
"""Minimum wait, since a server that sends `Retry-After: 0` has still refused the request."""


async def fetch(request: Request, config: FetchConfig, sender: Sender, hosts: Hosts) -> Reply:
    """Sends the request. Raises TaskFailed, whose error class decides whether the task is retried."""
    try:
        return await _fetch(request, config, sender, hosts)
    except OutboundFailed as error:
        raise TaskFailed(str(error), type(error).__name__) from None


async def _fetch(request: Request, config: FetchConfig, sender: Sender, hosts: Hosts) -> Reply:
    url = read_url(request.url)
    host = f"{url.raw_host}:{url.port}"
    bounds = Bounds(config.timeout_seconds, config.max_bytes, redirects=config.follow_redirects)
    budget = WaitBudget(config.max_wait_seconds)
    left = config.retries
    while True:
        async with hosts.permit(host, config.max_per_host, config.delay_seconds, budget):
            reply = await sender.send(request, bounds)
        if reply.status < _FIRST_FAILURE or reply.status in config.accept:
            return reply
        wait = _wait(reply, config)
        if wait is not None:
            hosts.hold(host, wait)
        if wait is None or wait > budget.left or left == 0:
            raise _failure(reply.status, wait, config, host)
        left -= 1


def _wait(reply: Reply, config: FetchConfig) -> float | None:
    """Returns the seconds to wait before a retry; None if the server names no time or the status is not retried."""
    if reply.status not in config.retry:
        return None
    seconds = retry_after(reply.headers.get("retry-after"), datetime.now(UTC))
    return None if seconds is None else max(seconds, _SHORTEST_HOLD_SECONDS)


def _failure(status: int, wait: float | None, config: FetchConfig, host: str) -> TaskFailed:
    answered = f"{host} answered with status {status}"
    if status not in config.retry:
        return TaskFailed(
            f"{answered}. If this status is a valid result, add {status} to accept; if it is temporary, add it to "
            "retry.",
            "HttpRefused",
        )
    then = "" if wait is None else f" and asks for a retry after {wait:.0f} s"
    return TaskFailed(f"{answered}{then}.", "RateLimited" if status == _TOO_MANY else "HttpUnavailable")


def retry_after(value: str | None, now: datetime) -> float | None:
    """Parses a Retry-After header, a number of seconds or a date, into seconds; None if it is neither."""
    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text[:12]), 1e9)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    seconds = ((date if date.tzinfo else date.replace(tzinfo=UTC)) - now).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


SHOWN_HEADERS: Final = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-length",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "link",
    "location",
    "retry-after",
    "server",
    "vary",
    "x-robots-tag",
)
_LONGEST_HEADER: Final = 1_000
_LONGEST_URL: Final = 8_000
_USUAL: Final = "utf-8"


def result_of(reply: Reply, config: FetchConfig, elapsed: float, limit: int) -> dict[str, Any]:
    """Returns the result, of at most `limit` bytes as JSON."""
    result: dict[str, Any] = {
        "url": plain(reply.url, _LONGEST_URL),
        "status": reply.status,
        "headers": {
            name: plain(reply.headers[name], _LONGEST_HEADER) for name in SHOWN_HEADERS if name in reply.headers
        },
        "bytes": len(reply.body),
        "sha256": hashlib.sha256(reply.body).hexdigest(),
        "elapsed_ms": round(elapsed * 1000),
    }
    if config.keep_body == "none":
        return result
    with_body = result | _body(reply)
    if len(reply.body) <= limit and len(msgspec.json.encode(with_body)) <= limit:
        return with_body
    if config.keep_body == "required":
        raise TaskFailed(
            f"The response body has {len(reply.body)} bytes, and a result with it would exceed the limit of {limit} "
            "bytes: raise result_limit_bytes, or set keep_body to inline or none.",
            "BodyTooLarge",
        )
    return result | {"body_omitted": True}


def _body(reply: Reply) -> dict[str, str]:
    text = _text(reply)
    if text is not None:
        return {"body": text, "body_encoding": "text"}
    return {"body": base64.b64encode(reply.body).decode(), "body_encoding": "base64"}


def _text(reply: Reply) -> str | None:
    """Returns the body as text, or None if it is not text or contains characters that Postgres cannot store."""
    text = _decoded(reply.body, _charset(reply.headers.get("content-type", "")))
    if text is None:
        return None
    return None if "\0" in text or plain(text, len(text)) != text else text


def _charset(content_type: str) -> str:
    header = Message()
    header["content-type"] = plain(content_type, _LONGEST_HEADER).replace("\n", " ").replace("\r", " ")
    return str(header.get_param("charset", _USUAL))


def _decoded(body: bytes, charset: str) -> str | None:
    try:
        return body.decode(charset)
    except UnicodeError:
        return None
    except (LookupError, ValueError):  # an unknown charset, or a Python codec that does not decode to text
        return _decoded(body, _USUAL)


LONGEST_HOLD_SECONDS: Final = 3600.0
"""Caps the wait that a server asks for. Later times in the file come from a clock that was wrong, and are ignored."""

_MAX_PERMITS: Final = 64
_FIRST_POLL_SECONDS: Final = 0.01
_LONGEST_POLL_SECONDS: Final = 0.25
_time: Final = struct.Struct("<d")


class HostBusy(TaskFailed):
    """The permit for the host would come later than this attempt may wait."""


class WaitBudget:
    """The rest of the time that an attempt may wait."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    async def wait(self, seconds: float, why: str) -> None:
        if seconds > self.left:
            raise HostBusy(
                f"{why}, and this attempt may not wait that long: raise max_wait_seconds or the job's backoff_seconds, "
                "or lower its max_concurrency."
            )
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self.left = max(self.left - (time.monotonic() - began), 0.0)


class Hosts:
    """Permits for requests to hosts.

    Create one per process: POSIX drops all locks of a process on a file as soon as it closes any descriptor of it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        _own(folder)
        self._clock = clock
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._permits = os.open(folder / "places", flags, 0o600)
        self._times = os.open(folder / "turns", flags, 0o600)

    def close(self) -> None:
        os.close(self._permits)
        os.close(self._times)

    @asynccontextmanager
    async def permit(self, host: str, limit: int, delay: float, budget: WaitBudget) -> AsyncIterator[None]:
        """Holds one of `limit` permits for the host, from the moment that a request may start. Raises HostBusy."""
        offset = await self._acquire(host, limit, budget)
        try:
            while (wait := self._reserve(host, delay)) > 0:
                await budget.wait(wait, f"{host} takes no request for another {wait:.1f} s")
            yield
        finally:
            fcntl.lockf(self._permits, fcntl.LOCK_UN, 1, offset)

    async def _acquire(self, host: str, limit: int, budget: WaitBudget) -> int:
        first = int.from_bytes(_digest(host)[:6]) * _MAX_PERMITS
        pause = _FIRST_POLL_SECONDS
        while True:
            for offset in range(first, first + limit):
                with suppress(OSError):  # another process holds it
                    fcntl.lockf(self._permits, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                    return offset
            await budget.wait(min(pause, budget.left or pause), f"{host} already serves {limit} other requests")
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _reserve(self, host: str, delay: float) -> float:
        """Returns 0 and moves the next start by `delay` if a request may start now; else the seconds to wait."""
        with self._entry(host) as at:
            now, free = self._clock(), self._free(at)
            if free > now:
                return free - now
            if delay > 0:
                os.pwrite(self._times, _time.pack(now + delay), at)
            return 0.0

    def hold(self, host: str, seconds: float) -> None:
        """Blocks requests to the host for as long as its Retry-After asks."""
        with self._entry(host) as at:
            until = self._clock() + min(seconds, LONGEST_HOLD_SECONDS)
            os.pwrite(self._times, _time.pack(max(until, self._free(at))), at)

    def _free(self, at: int) -> float:
        data = os.pread(self._times, _time.size, at)
        free: float = _time.unpack(data)[0] if len(data) == _time.size else 0.0
        return free if free <= self._clock() + LONGEST_HOLD_SECONDS else 0.0

    @contextmanager
    def _entry(self, host: str) -> Iterator[int]:
        at = int.from_bytes(_digest(host)[6:8]) * _time.size
        fcntl.lockf(self._times, fcntl.LOCK_EX, _time.size, at)
        try:
            yield at
        finally:
            fcntl.lockf(self._times, fcntl.LOCK_UN, _time.size, at)


@cache
def hosts_of_this_machine() -> Hosts:
    return Hosts(Path(tempfile.gettempdir()) / f"interlock-hosts-{os.getuid()}")


def _digest(host: str) -> bytes:
    return hashlib.sha256(host.encode()).digest()


def _own(folder: Path) -> None:
    """Creates the folder, and checks its owner: in a world-writable folder another user may have taken the name."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise TaskFailed(
            f"{folder} must be a folder that belongs to this user, with mode 0700: remove it, or set TMPDIR for the "
            "worker.",
            "BadTempFolder",
        )
