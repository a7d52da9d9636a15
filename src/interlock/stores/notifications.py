"""LISTEN/NOTIFY as wake-ups, with polling as the fallback: a lost notification delays work but never loses it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque

import asyncpg
import structlog

log = structlog.get_logger()

QUEUE_CHANNEL = "interlock_queue"
OUTBOX_CHANNEL = "interlock_outbox"
COMMANDS_CHANNEL = "interlock_commands"
"""Queues of the command bus. They are numerous and busy, and only gateways and `interlock serve bus` listen to them."""
CHECK_SECONDS = 5.0
"""Interval of health checks of the LISTEN connection, and the timeout of its statements."""
RECONNECT_SECONDS = 0.5
LOST_SECONDS = 2 * CHECK_SECONDS + RECONNECT_SECONDS
"""Maximum time until a silently dead connection is replaced. Until then, receivers and the relay poll."""


class Wakeups:
    """Waiters by topic. A wake-up releases one waiter, which wakes the next if it found work: no thundering herd."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._pending: set[str] = set()
        self.closed = False

    def close(self) -> None:
        """Starts the drain: releases all waiters."""
        self.closed = True
        self.wake_all()

    def wake(self, topic: str) -> None:
        waiting = self._waiting[topic]
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        # No waiter yet: the next one must return immediately.
        self._pending.add(topic)

    def wake_all(self) -> None:
        for topic in list(self._waiting):
            while self._waiting[topic]:
                self.wake(topic)

    async def wait(self, topic: str, timeout: float) -> bool:
        if self.closed:
            return False
        if topic in self._pending:
            self._pending.discard(topic)
            return True
        future = asyncio.get_running_loop().create_future()
        self._waiting[topic].append(future)
        try:
            await asyncio.wait_for(future, timeout)
        except TimeoutError:
            return False
        else:
            return True
        finally:
            with contextlib.suppress(ValueError):  # wake() has already removed it
                self._waiting[topic].remove(future)


class Listener:
    """Keeps one LISTEN connection open and converts notifications to wake-ups."""

    def __init__(self, url: str, wakeups: Wakeups, *, commands: bool = False) -> None:
        self._url = url
        self._wakeups = wakeups
        self._queue_channels = [QUEUE_CHANNEL, *([COMMANDS_CHANNEL] if commands else [])]
        self.connected = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                await self._listen()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
                log.warning("listen.reconnecting", reason=type(error).__name__)
            self.connected.clear()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _listen(self) -> None:
        # The timeout also applies to LISTEN itself, because a connection may hang right after it is established.
        connection = await asyncpg.connect(
            self._url,
            timeout=10,
            command_timeout=CHECK_SECONDS,
            server_settings={"application_name": "interlock-listen"},
        )
        try:
            for channel in self._queue_channels:
                await connection.add_listener(channel, self._on_queue)
            await connection.add_listener(OUTBOX_CHANNEL, self._on_outbox)
            self.connected.set()
            # Waiters must check for work: notifications sent before the listeners were added are lost.
            self._wakeups.wake_all()
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _connection: lost.set())
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lost.wait(), CHECK_SECONDS)
                # A half-open connection delivers nothing and reports no error; only a query detects it.
                await connection.fetchval("select 1")
        finally:
            connection.terminate()

    def _on_queue(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._wakeups.wake(f"queue:{payload}")

    def _on_outbox(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        """Wakes the loop of this kind of outbox row; each kind has its own loop."""
        self._wakeups.wake(str(payload) or "outbox")
