"""The operator `http_fetch`: sends requests from a separate thread while the operator's thread waits.

A cancel is raised in the operator's thread, at any instruction. That thread does nothing but wait, so a cancel does no
harm there; inside an event loop it would be raised in whatever callback was running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

from interlock.outbound.exchange import Proxy, Reply, Request, Sender
from interlock.outbound.guard import Binding
from interlock.workers.context import TaskContext, TaskFailed
from interlock.workers.failures import BadConfig
from interlock.workers.http_fetch.config import FetchConfig, read_config, rendered
from interlock.workers.http_fetch.fetch import fetch, hosts_of_this_machine, result_of
from interlock.workers.operator_requests import Placeholders, guard_of, proxy_of
from interlock.workers.protocol import Outbound

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
