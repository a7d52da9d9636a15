"""Coordination in Valkey: limits, rates and cached reads that all processes share.

It is never the source of truth, so losing it loses no data. While it is unavailable, each caller decides: a cache falls
back to PostgreSQL, a limit defers work or counts per process. No caller lets work through unchecked.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from valkey.asyncio import Valkey
from valkey.exceptions import ValkeyError

log = structlog.get_logger()

_WARN_SECONDS = 60.0
_PAUSE_SECONDS = 1.0
"""Pause after a failure, so that a hanging server does not cost every request a timeout."""

# INCR and the expiry are one atomic step, so that no key is left without an expiry.
_COUNT = """
local n = redis.call('INCR', KEYS[1])
if n == 1 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {n, redis.call('PTTL', KEYS[1])}
"""


class Coordination:
    def __init__(self, url: str) -> None:
        self._client: Any = Valkey.from_url(url, socket_timeout=0.5, socket_connect_timeout=0.5)
        self._scripts: dict[str, Any] = {}
        self._warned_at = float("-inf")
        self._retry_at = float("-inf")

    async def count(self, key: str, *, window_seconds: float) -> tuple[int, float] | None:
        """Counts one use of `key`. Returns its uses in the window and the remaining seconds; None if unavailable."""
        counted = await self.script(_COUNT, keys=[f"interlock:rate:{key}"], args=[int(window_seconds * 1000)])
        if counted is None:
            return None
        used, left_ms = counted
        return used, left_ms / 1000

    async def script(self, text: str, *, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Returns the result of a script. This and the methods below return None while the server is unavailable."""
        if text not in self._scripts:
            self._scripts[text] = self._client.register_script(text)
        return await self._call(lambda: self._scripts[text](keys=list(keys), args=list(args)))

    async def get(self, key: str) -> bytes | None:
        found: bytes | None = await self._call(lambda: self._client.get(key))
        return found

    async def field(self, key: str, name: str) -> bytes | None:
        found: bytes | None = await self._call(lambda: self._client.hget(key, name))
        return found

    async def put(self, key: str, value: bytes, *, milliseconds: int) -> None:
        await self._call(lambda: self._client.set(key, value, px=milliseconds))

    async def drop(self, keys: Sequence[str]) -> None:
        await self._call(lambda: self._client.delete(*keys))

    async def _call(self, work: Callable[[], Awaitable[Any]]) -> Any:
        if time.monotonic() < self._retry_at:
            return None
        try:
            return await work()
        except (ValkeyError, OSError, TimeoutError) as error:
            self._retry_at = time.monotonic() + _PAUSE_SECONDS
            self._warn(error)
            return None

    async def answers(self) -> bool:
        try:
            return bool(await self._client.ping())
        except (ValkeyError, OSError, TimeoutError):
            return False

    async def close(self) -> None:
        await self._client.aclose()

    def _warn(self, error: Exception) -> None:
        if time.monotonic() - self._warned_at > _WARN_SECONDS:
            self._warned_at = time.monotonic()
            effect = "runs with limits start no tasks, request limits count per process, rates are unknown"
            log.warning("valkey.away", reason=type(error).__name__, effect=effect)
