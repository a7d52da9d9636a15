"""One attempt: waits its turn, asks, and asks again where the server says when."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from interlock.outbound.failures import OutboundFailed
from interlock.outbound.sending import Bounds, Reply, Request, Sender, read_url
from interlock.pipeline.http_fetch.config import FetchConfig
from interlock.pipeline.http_fetch.politeness import Hosts, Patience
from interlock.workers.context import TaskFailed

_FIRST_FAILURE: Final = 400
_TOO_MANY: Final = 429
_SHORTEST_HOLD_SECONDS: Final = 0.05
"""A server that says "at once" has still refused."""


async def fetch(request: Request, config: FetchConfig, sender: Sender, hosts: Hosts) -> Reply:
    """Raises TaskFailed, with a class that says whether another attempt may go better."""
    try:
        return await _fetch(request, config, sender, hosts)
    except OutboundFailed as error:
        raise TaskFailed(str(error), type(error).__name__) from None


async def _fetch(request: Request, config: FetchConfig, sender: Sender, hosts: Hosts) -> Reply:
    url = read_url(request.url)
    host = f"{url.raw_host}:{url.port}"
    bounds = Bounds(config.timeout_seconds, config.max_bytes, redirects=config.follow_redirects)
    patience = Patience(config.max_wait_seconds)
    left = config.retries
    while True:
        async with hosts.turn(host, config.max_per_host, config.delay_seconds, patience):
            reply = await sender.send(request, bounds)
        if reply.status < _FIRST_FAILURE or reply.status in config.accept:
            return reply
        wait = _wait(reply, config)
        if wait is not None:
            hosts.hold(host, wait)
        if wait is None or wait > patience.left or left == 0:
            raise _failure(reply.status, wait, config, host)
        left -= 1


def _wait(reply: Reply, config: FetchConfig) -> float | None:
    """What the server asks for before it is asked again; None when it says nothing, or when that is pointless."""
    if reply.status not in config.retry:
        return None
    said = retry_after(reply.headers.get("retry-after"), datetime.now(UTC))
    return None if said is None else max(said, _SHORTEST_HOLD_SECONDS)


def _failure(status: int, wait: float | None, config: FetchConfig, host: str) -> TaskFailed:
    said = f"{host} answers {status}"
    if status not in config.retry:
        return TaskFailed(
            f"{said}. If that is a result, name {status} in accept; if it will pass, in retry.", "HttpRefused"
        )
    then = "" if wait is None else f", and wants to be asked again in {wait:.0f} s"
    return TaskFailed(f"{said}{then}.", "RateLimited" if status == _TOO_MANY else "HttpUnavailable")


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds, from a number of them or from a date; None when it says neither."""
    text = (value or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text[:12]), 1e9)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    seconds = ((date if date.tzinfo else date.replace(tzinfo=UTC)) - now).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None
