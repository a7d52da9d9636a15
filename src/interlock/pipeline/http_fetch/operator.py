"""`http_fetch` as an operator: it asks in a thread of its own, and this one waits.

A cancel is raised in the operator's thread, anywhere. There it hits nothing but a wait; inside an event loop it would
end up in whatever callback was running.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from interlock.outbound.bindings import Binding
from interlock.outbound.sending import Proxy, Reply, Request, Sender
from interlock.pipeline.asking import guard_of, proxy_of
from interlock.pipeline.failures import BadConfig
from interlock.pipeline.http_fetch.config import FetchConfig, read_config
from interlock.pipeline.http_fetch.fetching import fetch
from interlock.pipeline.http_fetch.politeness import hosts_of_this_machine
from interlock.pipeline.http_fetch.reporting import result_of
from interlock.pipeline.http_fetch.template import rendered
from interlock.pipeline.placeholders import Placeholders
from interlock.workers.context import TaskContext, TaskFailed
from interlock.workers.protocol import Outbound

_JOIN_SECONDS: Final = 1.0
"""A name that is being looked up cannot be called off: the thread is left to itself."""


def http_fetch(payload: Any, ctx: TaskContext) -> dict[str, Any]:
    """Asks the URL of the payload, politely, and returns what the server answers."""
    keys = Placeholders.of(ctx)
    config = read_config(ctx.config, keys)
    request = replace(request_of(payload, config), bindings=keys.bindings("headers"))
    sender, hosts = sender_of(config, ctx.outbound, keys.bindings("proxy")), hosts_of_this_machine()
    began = time.monotonic()
    reply = _Aside().run(lambda: fetch(request, config, sender, hosts))
    return result_of(reply, config, time.monotonic() - began, ctx.outbound.result_limit)


def request_of(payload: Any, config: FetchConfig) -> Request:
    fields = {"url": payload} if isinstance(payload, str) else payload
    url = fields.get("url") if isinstance(fields, dict) else None
    if not isinstance(url, str):
        raise TaskFailed(
            'http_fetch needs a payload like {"url": "https://example.com/"}, or the URL itself', "BadPayload"
        )
    if config.body is None:
        return Request(url, config.method, config.headers)
    typed = {"content-type": "application/json"} | {name.lower(): value for name, value in config.headers.items()}
    return Request(url, config.method, typed, rendered(config.body, fields))


def sender_of(config: FetchConfig, outbound: Outbound, bindings: tuple[Binding, ...] = ()) -> Sender:
    """`bindings`: of the secrets in the job's own proxy."""
    guard = guard_of(outbound)
    if outbound.proxy is None:
        return Sender(guard, proxy=None if config.proxy is None else Proxy(config.proxy, bindings=bindings))
    if config.proxy is not None:
        raise BadConfig("This installation sends all requests through a proxy of its own: leave `proxy` out.")
    return Sender(guard, proxy=proxy_of(outbound))


class _Aside:
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
        """Harmless when the loop has ended by itself."""
        self._stop.set()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has just been closed
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
