"""The operator `block_follower`: runs the loop in a separate thread, and connects it to the platform.

A cancel is raised in the operator's thread, at any instruction. That thread does nothing but wait, so a cancel does no
harm there; inside an event loop it would be raised in whatever callback was running.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from interlock.outbound.exchange import Request
from interlock.wire.attempts import Event
from interlock.workers.block_follower.chain import Chain
from interlock.workers.block_follower.config import FollowerConfig, read_config
from interlock.workers.block_follower.follower import Follower
from interlock.workers.block_follower.rpc import Endpoint
from interlock.workers.block_follower.store import Producer, Store, Target, location_of
from interlock.workers.context import TaskContext
from interlock.workers.operator_requests import Placeholders, kept_sender
from interlock.workers.protocol import Outbound

_Request = tuple[list[Event], "Future[None]"]


def block_follower(payload: Any, ctx: TaskContext) -> dict[str, Any]:  # noqa: ARG001 - the signature of operators
    """Follows a chain and writes its blocks, transactions and logs, forever or up to `end_block`."""
    keys = Placeholders.of(ctx)
    config = read_config(ctx.config, len(ctx.outputs), keys)
    asked = Request(config.rpc_url, headers=config.headers, bindings=keys.bindings("rpc_url", "headers"))
    targets = [
        Target(kind, output.dataset_uuid, output.dataset_version)
        for kind, output in zip(config.outputs or (), ctx.outputs, strict=True)
    ]
    last = _Bridge(ctx, asked).run(config, targets, ctx.data_url)
    return {"last_block": last, "locations": [location_of(target.dataset_version) for target in targets]}


class _Bridge:
    """The loop's `Platform`. Events go through the operator's own thread, which the context requires."""

    def __init__(self, ctx: TaskContext, asked: Request) -> None:
        self._ctx, self._asked = ctx, asked
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._outcome: Future[int] = Future()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[int] | None = None

    # In the loop's thread

    async def emit(self, events: list[Event]) -> None:
        done: Future[None] = Future()
        self._requests.put((events, done))
        await asyncio.wrap_future(done)

    def progress(self, share: float, text: str) -> None:
        self._ctx.progress(share, text)

    @property
    def paused(self) -> bool:
        return self._ctx.paused

    # In the operator's thread

    def run(self, config: FollowerConfig, targets: Sequence[Target], data_url: str) -> int:
        producer = Producer(self._ctx.task_id, self._ctx.attempt)
        thread = threading.Thread(
            target=self._work, args=(config, targets, data_url, producer), name="block_follower", daemon=True
        )
        thread.start()
        try:
            while (request := self._requests.get()) is not None:
                self._answer(*request)
        finally:
            self._end()
            thread.join()
        return self._outcome.result()

    def _answer(self, events: list[Event], done: Future[None]) -> None:
        try:
            self._ctx.emit(events)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _end(self) -> None:
        """Cancels the loop. Has no effect if it has already ended."""
        self._stop.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    # The thread of the loop

    def _work(self, config: FollowerConfig, targets: Sequence[Target], data_url: str, producer: Producer) -> None:
        try:
            with asyncio.Runner() as runner:
                self._outcome.set_result(runner.run(self._main(config, targets, data_url, producer)))
        except BaseException as error:
            self._outcome.set_exception(error)
        finally:
            self._requests.put(None)

    async def _main(self, config: FollowerConfig, targets: Sequence[Target], data_url: str, producer: Producer) -> int:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._stop.is_set():
            raise asyncio.CancelledError
        async with Store.open(data_url, targets, producer) as store:
            endpoint = _endpoint(config, self._asked, self._ctx.outbound)
            try:
                follower = Follower(config, _chain(config, endpoint), store, self)
                endpoint.on_trouble = follower.trouble
                return await follower.run()
            finally:
                await endpoint.close()


def _endpoint(config: FollowerConfig, asked: Request, outbound: Outbound) -> Endpoint:
    return Endpoint(
        asked,
        kept_sender(outbound),
        timeout=config.rpc_timeout_seconds,
        patience=config.rpc_patience_seconds,
        most_calls=config.batch_size + 1,
    )


def _chain(config: FollowerConfig, endpoint: Endpoint) -> Chain:
    kinds = config.outputs or ()
    return Chain(endpoint, in_full="transactions" in kinds, with_logs="logs" in kinds, span=config.batch_size)
