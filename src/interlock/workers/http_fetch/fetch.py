"""One attempt: waits for a permit, sends the request, and retries when the server names a time in Retry-After."""

from __future__ import annotations

import base64
import hashlib
import math
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from interlock.outbound.exchange import Bounds, Reply, Request, Sender, read_url
from interlock.outbound.failures import OutboundFailed
from interlock.workers.context import TaskFailed, plain
from interlock.workers.http_fetch.config import FetchConfig
from interlock.workers.http_fetch.host_limits import Hosts, WaitBudget

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
