"""`block_follower` as an operator: the loop runs in a thread of its own, this one stands between it and the platform.

A cancel is raised in the operator's thread, anywhere. There it hits nothing but a wait; inside an event loop it would
end up in whatever callback was running.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from interlock.outbound.sending import Request
from interlock.pipeline.asking import kept_sender
from interlock.pipeline.follower.chain import Chain
from interlock.pipeline.follower.config import FollowerConfig, read_config
from interlock.pipeline.follower.following import Follower
from interlock.pipeline.follower.rpc import Endpoint
from interlock.pipeline.follower.store import Producer, Store, Target, location_of
from interlock.pipeline.placeholders import Placeholders
from interlock.wire import Event
from interlock.workers.context import TaskContext
from interlock.workers.protocol import Outbound

_Request = tuple[list[Event], "Future[None]"]


def block_follower(payload: Any, ctx: TaskContext) -> dict[str, Any]:  # noqa: ARG001 - an operator takes both
    """Follows a chain into blocks, transactions and logs, for ever or up to `end_block`."""
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
    """The platform as the loop sees it. Events go through the operator's own thread, as the context asks for."""

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
        """Harmless when the loop has ended by itself."""
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
