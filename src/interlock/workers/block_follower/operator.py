"""The operator `block_follower`: runs its loop in a separate thread, and connects it to the platform.

A cancel is raised in the operator's thread, at any instruction. That thread does nothing but wait, so a cancel does no
harm there; inside an event loop it would be raised in whatever callback was running.

The loop reads ahead, writes in order, emits events and rolls back after a reorg.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, Final, Protocol

from interlock.outbound.exchange import Request
from interlock.wire.attempts import Event
from interlock.workers.block_follower.chain import Block, Chain, Moved, records
from interlock.workers.block_follower.config import FollowerConfig, read_config
from interlock.workers.block_follower.rpc import Endpoint, RpcFailed
from interlock.workers.block_follower.store import Producer, Store, Stored, Superseded, Target, location_of
from interlock.workers.context import TaskContext, TaskFailed
from interlock.workers.operator_requests import Placeholders, kept_sender
from interlock.workers.protocol import Outbound

ANNOUNCE_SECONDS: Final = 0.5
"""Interval of cursor events while the follower reads history."""
FIRST_STEPS: Final = 8
"""Blocks that are compared first when a reorg is suspected. Each further step doubles the number."""


class ReorgTooDeep(TaskFailed):
    """The chain and the stored blocks differ further back than the stored hashes reach."""


class Platform(Protocol):
    """The follower's interface to the platform."""

    async def emit(self, events: list[Event]) -> None:
        """Emits events. Returns when they are durable."""

    def progress(self, share: float, text: str) -> None: ...

    @property
    def paused(self) -> bool: ...


class Follower:
    def __init__(self, config: FollowerConfig, chain: Chain, store: Store, platform: Platform) -> None:
        self._config, self._chain, self._store, self._platform = config, chain, store, platform
        self._position = -1
        self._cursor: int | None = None
        self._hashes: dict[int, str] = {}
        self._head = 0
        self._agreed = False
        self._announced_at = 0.0
        self._announced_to: int | None = None
        self._trouble: str | None = None

    async def run(self) -> int:
        """Follows the chain up to `end_block`, or forever if it is unset. Returns the last block."""
        self._resume(await self._take_over())
        await self._announce()
        while True:
            self._store.require_open()
            is_busy = not self._platform.paused and await self._step()
            self._show()
            if self._finished:
                return self._position
            if not is_busy:
                await asyncio.sleep(self._config.poll_seconds)

    async def _take_over(self) -> Stored:
        chain = (*await self._chain.identity(), self._config.start_block)
        try:
            return await self._store.take_over(*chain)
        except Superseded:
            # Either this attempt was suspended for long, or the task was created again and its attempts count from 1.
            # Emitting the known cursor changes nothing, and the dispatcher accepts it only from the lease holder. If
            # it succeeds, this attempt is the newest.
            await self._platform.emit(self._cursor_events(await self._store.told_cursor() or 0))
            return await self._store.take_over(*chain, proven=True)

    def trouble(self, reason: str | None) -> None:
        """Shows the reason why the endpoint is being retried; None after it has answered."""
        if reason != self._trouble:
            self._trouble = reason
            self._show()

    def _resume(self, stored: Stored) -> None:
        self._position, self._cursor = stored.position, stored.cursor
        self._hashes = stored.hashes
        self._announced_to = None

    @property
    def _finished(self) -> bool:
        """True if the last block is stored and the next poll of the chain found no reorg."""
        return self._agreed and self._config.end_block is not None and self._position >= self._config.end_block

    @property
    def _target(self) -> int:
        """The last block that may be read now."""
        confirmed = self._head - self._config.confirmations
        return confirmed if self._config.end_block is None else min(confirmed, self._config.end_block)

    async def _step(self) -> bool:
        """Polls the chain once and does the work that results. Returns False if there was none."""
        self._agreed = False
        try:
            self._head, there = await self._chain.head(self._position)
            if there is not None and self._hashes.get(self._position, there.hash) != there.hash:
                return await self._go_back()
            if there is None and self._position >= self._config.start_block:
                return await self._look_lower()
            self._agreed = self._target <= self._position
            return not self._agreed and await self._catch_up()
        except Moved:
            return False

    async def _look_lower(self) -> bool:
        """Handles an endpoint without our newest block: it lags behind, or it has a shorter branch after a reorg."""
        known = self._hashes.get(self._head)
        if known is None:
            return False
        there = (await self._chain.headers([self._head])).get(self._head)
        return there is not None and there.hash != known and await self._go_back()

    # Forward

    async def _catch_up(self) -> bool:
        before = self._position
        async with aclosing(self._read_ahead(self._position + 1, self._target)) as spans:
            async for blocks in spans:
                if blocks[0].parent_hash != self._hashes.get(self._position, blocks[0].parent_hash):
                    break  # the next poll finds the common ancestor
                await self._write(blocks[0].height, blocks)
                if self._platform.paused:
                    break
        return self._position > before

    async def _read_ahead(self, first: int, last: int) -> AsyncGenerator[list[Block], None]:
        """Yields batches in order, with up to `requests` of them in flight."""
        size = self._config.batch_size
        flights: deque[asyncio.Task[list[Block]]] = deque()
        try:
            while first <= last or flights:
                while first <= last and len(flights) < self._config.requests:
                    flights.append(asyncio.create_task(self._chain.blocks(first, min(first + size - 1, last))))
                    first += size
                yield await flights[0]
                flights.popleft()
        finally:
            for flight in flights:
                flight.cancel()
            await asyncio.gather(*flights, return_exceptions=True)

    # Back

    async def _go_back(self) -> bool:
        """Finds the common ancestor of the branches, and replaces all later blocks in one transaction."""
        ancestor = await self._common_ancestor()
        first, last = ancestor + 1, min(self._target, self._position)
        blocks: list[Block] = []
        size = self._config.batch_size
        for start in range(first, last + 1, size):
            blocks += await self._chain.blocks(start, min(start + size - 1, last))
        if any(block.parent_hash != before.hash for before, block in itertools.pairwise(blocks)):
            raise Moved
        if blocks and blocks[0].parent_hash != self._hashes.get(ancestor, blocks[0].parent_hash):
            raise Moved
        await self._write(first, blocks)
        return True

    async def _common_ancestor(self) -> int:
        lowest = min(self._hashes)
        highest, steps = min(self._position, self._head), FIRST_STEPS
        while highest >= lowest:
            numbers = range(highest, max(highest - steps, lowest - 1), -1)
            found = await self._chain.headers(numbers)
            for number in numbers:
                if number in found and found[number].hash == self._hashes[number]:
                    return number
            highest, steps = numbers[-1] - 1, steps * 2
        if lowest == self._config.start_block:
            return lowest - 1
        raise ReorgTooDeep(
            f"The chain differs from the stored blocks at block {lowest}, and older hashes are not kept (keep_hashes "
            f"is {self._config.keep_hashes}). If the endpoint is right, deploy the job with a larger keep_hashes: it "
            "then reads the chain again, into new dataset versions."
        )

    # Writing and events

    async def _write(self, first: int, blocks: Sequence[Block]) -> None:
        try:
            made = {target.kind: records(target.kind, blocks) for target in self._store.targets}
        except (ValueError, OverflowError, OSError) as error:
            raise RpcFailed(f"The RPC endpoint returned an invalid block: {error}", "BadBlock") from error
        rewritten = self._cursor is not None and first <= self._cursor
        hashes = [block.hash for block in blocks]
        self._cursor = await self._store.write(first, hashes, made, self._config.keep_hashes)
        self._remember(first, hashes)
        if rewritten or self._position >= self._target or time.monotonic() - self._announced_at > ANNOUNCE_SECONDS:
            await self._announce()
        self._show()

    def _remember(self, first: int, hashes: Sequence[str]) -> None:
        """Updates the hashes in memory exactly as the write updated `followed_blocks`."""
        for number in range(first, self._position + 1):
            self._hashes.pop(number, None)
        self._hashes.update(enumerate(hashes, first))
        self._position = first + len(hashes) - 1
        for number in [number for number in self._hashes if number <= self._position - self._config.keep_hashes]:
            del self._hashes[number]

    async def _announce(self) -> None:
        """Emits the pending rewrites together with the cursor, since a range must not lie beyond it.

        If the answer is lost, the same events are emitted again.
        """
        while True:
            owed = await self._store.owed()
            events = [
                Event(
                    dataset_uuid=target.dataset_uuid,
                    dataset_version=target.dataset_version,
                    partition_key=f"{one.start}-{one.end}",
                    start=one.start,
                    end=one.end,
                    sequence=one.owed_id,
                )
                for one in owed
                for target in self._store.targets
                if target.dataset_version == one.dataset_version
            ]
            if self._cursor is not None and (owed or self._announced_to != self._cursor):
                events += self._cursor_events(self._cursor)
            if events:
                await self._platform.emit(events)
            self._announced_at, self._announced_to = time.monotonic(), self._cursor
            if not owed:
                return
            await self._store.announced(owed)

    def _cursor_events(self, cursor: int) -> list[Event]:
        return [
            Event(dataset_uuid=one.dataset_uuid, dataset_version=one.dataset_version, cursor=cursor)
            for one in self._store.targets
        ]

    def _show(self) -> None:
        target = max(self._target, self._position)
        done, all_ = self._position - self._config.start_block + 1, target - self._config.start_block + 1
        text = f"block {self._position} of {target}"
        if self._platform.paused:
            text += ", paused"
        if self._trouble:
            text += f"; {self._trouble}"
        self._platform.progress(done / all_ if all_ > 0 else 0.0, text)


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
