"""The operator `http_fetch`: requests the URL of a task and returns the server's response.

Requests are sent from a separate thread while the operator's thread waits. A cancel is raised in the operator's thread,
at any instruction. That thread does nothing but wait, so a cancel does no harm there; inside an event loop it would be
raised in whatever callback was running.

The config of the job is checked before any request is sent. One attempt waits for a permit of the host, sends the
request, and retries after the time in Retry-After.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import math
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.outbound.exchange import Bounds, Proxy, Reply, Request, Sender, read_url
from interlock.outbound.guard import Binding, OutboundFailed
from interlock.workers.block_follower.config import Seconds, check_header
from interlock.workers.context import TaskContext, TaskFailed, plain
from interlock.workers.failures import BadConfig
from interlock.workers.operator_requests import Placeholders, guard_of, proxy_of
from interlock.workers.protocol import Outbound

Status = Annotated[int, Meta(ge=100, le=599)]


class FetchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, str] = {}
    """Sent with every request. `${secret:NAME}` is replaced by a secret of the org."""
    body: Any = None
    """A JSON value, or its text. In its strings, `{{field}}` is replaced by a field of the payload, and
    `${secret:NAME}` by a secret of the org."""
    timeout_seconds: Seconds = 30.0
    """Timeout of one request including its redirects."""
    max_bytes: Annotated[int, Meta(ge=1, le=64 << 20)] = 1 << 20
    """Largest response body. A larger one fails the task."""
    follow_redirects: Annotated[int, Meta(ge=0, le=20)] = 5
    keep_body: Literal["inline", "required", "none"] = "inline"
    """inline: keep the body in the result; a body that does not fit fails the task. none: drop it. required: the
    former name of inline."""
    accept: Annotated[tuple[Status, ...], Meta(max_length=100)] = ()
    """Statuses of 400 and above that are results instead of failures."""
    retry: Annotated[tuple[Status, ...], Meta(max_length=100)] = (408, 425, 429, 500, 502, 503, 504)
    """Statuses that are worth a retry."""
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    """Retries within one attempt, when the server names a time in Retry-After."""
    max_wait_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Total time that an attempt may wait: for permits, and for times that servers name in Retry-After."""
    max_per_host: Annotated[int, Meta(ge=1, le=64)] = 2
    """Concurrent requests to one host, over all child processes of the workers on this machine."""
    delay_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Minimum time between the starts of two requests to one host."""
    proxy: str | None = None
    """http:// URL of a forward proxy. May contain `${secret:NAME}`, as in `headers`."""


def read_config(given: Mapping[str, Any], keys: Placeholders) -> FetchConfig:
    """Returns the checked config with its secrets filled in. Raises BadConfig."""
    try:
        config = msgspec.convert(dict(given), FetchConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of http_fetch is invalid: {error}. See docs/http-fetch.md.") from None
    headers = {name: keys.fill(value, f"headers.{name}") for name, value in config.headers.items()}
    for name, value in headers.items():
        check_header(name, value)
    proxy = None if config.proxy is None else keys.fill(config.proxy, "proxy")
    if proxy is not None and not re.fullmatch(r"http://[^\s/?#]+/?", proxy):
        raise BadConfig("proxy must look like http://host:port or http://user:password@host:port.")
    return msgspec.structs.replace(config, headers=headers, proxy=proxy, body=_body(config))


def _body(config: FetchConfig) -> Any:
    if config.body is None:
        return None
    if config.method in ("GET", "HEAD"):
        raise BadConfig(f"A {config.method} request has no body: set method to POST, or remove body.")
    body = config.body
    if isinstance(body, str):
        try:
            body = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise BadConfig(
                f'body is not valid JSON ({error}). Write {{{{field}}}} in quotes, as in {{"query": "{{{{query}}}}"}}: '
                "a string that consists of one field is replaced by the field's value, which keeps its type."
            ) from None
    check(body)
    return body


_FIELD: Final = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_FIELD_OR_SECRET: Final = re.compile(rf"{_FIELD.pattern}|\$\{{secret:[^}}]*\}}")
_PATH: Final = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_DEEPEST: Final = 50


def check(template: Any, depth: int = 0) -> None:
    """Checks the placeholders and the depth of a template. Raises BadConfig."""
    if depth > _DEEPEST:
        raise BadConfig(f"body is nested more than {_DEEPEST} levels deep: make it flatter.")
    if isinstance(template, str):
        for found in _FIELD.finditer(template):
            if not _PATH.fullmatch(found[1]):
                raise BadConfig(
                    f"body has the placeholder {found[0]}, which names no field: write {{{{field}}}} or "
                    "{{field.of.field}}."
                )
    for part in _parts(template):
        check(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def rendered(template: Any, payload: dict[str, Any], keys: Placeholders) -> bytes:
    """Returns the body as JSON. Raises TaskFailed if the payload lacks a field, or for a missing secret."""
    return msgspec.json.encode(_filled(template, payload, keys))


def _filled(template: Any, payload: dict[str, Any], keys: Placeholders) -> Any:
    match template:
        case str():
            return _string(template, payload, keys)
        case dict():
            return {
                _text(_string(name, payload, keys)): _filled(value, payload, keys) for name, value in template.items()
            }
        case list():
            return [_filled(value, payload, keys) for value in template]
    return template


def _string(template: str, payload: dict[str, Any], keys: Placeholders) -> Any:
    """Fills fields and secrets in one pass, so that neither is searched for placeholders of the other."""
    alone = _FIELD.fullmatch(template)
    if alone is not None:
        return _field(alone[1], payload)

    def value(found: re.Match[str]) -> str:
        return keys.fill(found[0], "body") if found[1] is None else _text(_field(found[1], payload))

    return _FIELD_OR_SECRET.sub(value, template)


def _text(value: Any) -> str:
    """Formats a value for use inside a longer string: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _field(path: str, payload: dict[str, Any]) -> Any:
    value: Any = payload
    for name in path.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise TaskFailed(f"The payload has no field {path!r}, which `body` of the config refers to.", "BadPayload")
    return value


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
    with_body = result | _encoded_body(reply)
    if len(reply.body) <= limit and len(msgspec.json.encode(with_body)) <= limit:
        return with_body
    raise TaskFailed(
        f"The response body has {len(reply.body)} bytes, and a result with it exceeds result_limit_bytes, which is "
        f"{limit}: raise the setting, for workers and dispatchers, or drop the body with `keep_body: none`.",
        "BodyTooLarge",
    )


def _encoded_body(reply: Reply) -> dict[str, str]:
    text = _encoded_text(reply)
    if text is not None:
        return {"body": text, "body_encoding": "text"}
    return {"body": base64.b64encode(reply.body).decode(), "body_encoding": "base64"}


def _encoded_text(reply: Reply) -> str | None:
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


_JOIN_SECONDS: Final = 1.0
"""A DNS lookup cannot be canceled. After this time the daemon thread is abandoned."""


def http_fetch(payload: Any, ctx: TaskContext) -> dict[str, Any]:
    """Requests the URL of the payload within the limits per host, and returns the server's response."""
    keys = Placeholders.of(ctx)
    config = read_config(ctx.config, keys)
    request = request_of(payload, config, keys)
    sender, hosts = sender_of(config, ctx.outbound, keys.bindings("proxy")), hosts_of_this_machine()
    began = time.monotonic()
    reply = _LoopThread().run(lambda: fetch(request, config, sender, hosts))
    return result_of(reply, config, time.monotonic() - began, ctx.outbound.result_limit)


def request_of(payload: Any, config: FetchConfig, keys: Placeholders) -> Request:
    fields = {"url": payload} if isinstance(payload, str) else payload
    url = fields.get("url") if isinstance(fields, dict) else None
    if not isinstance(url, str):
        raise TaskFailed(
            'http_fetch needs a payload such as {"url": "https://example.com/"}, or the URL as a string.', "BadPayload"
        )
    if config.body is None:
        return Request(url, config.method, config.headers, bindings=keys.bindings("headers"))
    typed = {"content-type": "application/json"} | {name.lower(): value for name, value in config.headers.items()}
    body = rendered(config.body, fields, keys)
    bindings, secret = keys.bindings("headers", "body"), keys.used_in("body")
    return Request(url, config.method, typed, body, bindings, secret_body=secret)


def sender_of(config: FetchConfig, outbound: Outbound, bindings: tuple[Binding, ...] = ()) -> Sender:
    """Returns the sender for this task. `bindings` are those of the secrets in the job's own proxy."""
    guard = guard_of(outbound)
    if outbound.proxy is None:
        return Sender(guard, proxy=None if config.proxy is None else Proxy(config.proxy, bindings=bindings))
    if config.proxy is not None:
        raise BadConfig("This installation sends all requests through its own proxy: remove `proxy` from the config.")
    return Sender(guard, proxy=proxy_of(outbound))


class _LoopThread:
    """Runs a coroutine on an event loop in a separate thread."""

    def __init__(self) -> None:
        self._outcome: Future[Reply] = Future()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def run(self, ask: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        thread = threading.Thread(target=self._work, args=(ask,), name="http_fetch", daemon=True)
        thread.start()
        try:
            return self._outcome.result()
        finally:
            self._end()
            thread.join(_JOIN_SECONDS)

    def _end(self) -> None:
        """Cancels the coroutine. Has no effect if the loop has already ended."""
        self._stop.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    # In the thread

    def _work(self, ask: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        try:
            with asyncio.Runner() as runner:
                self._outcome.set_result(runner.run(self._main(ask)))
        except BaseException as error:
            if not self._outcome.done():
                self._outcome.set_exception(error)

    async def _main(self, ask: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._stop.is_set():
            raise asyncio.CancelledError
        return await ask()
