"""Tasks on Spark: driver processes with one session each, in which tasks run at once.

    queue ─► ask the dispatcher what they read and write ─► driver ─► answers

A driver is started with the first task, and another when it is gone. One whose session has ended, or in which a thread
would not stop, is spent: it gets nothing new, the next driver is started beside it, and it is ended when the rest of
its tasks have. So what one task does costs the others nothing, short of killing the process that they share.

Every task has a key, and tasks of different keys never share a driver: tasks of the platform that are told the state
database's URL have a key of their own, and with `spark_driver_per_org` every org has. The number of drivers is bounded;
where another key needs one, the driver that has been idle for the longest time is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

import structlog

from interlock.errors import Fenced, Forbidden, InterlockError, NotFound, Unauthenticated
from interlock.wire import ClaimBatchReply, Crash, DataReply, DataRequest, Refusal, TaskData
from interlock.workers import driver_process, protocol
from interlock.workers.driver_process import PLATFORM, DriverLaunch, DriverProcess
from interlock.workers.held import Held
from interlock.workers.operators import ON_STATE, SPARK_MAP
from interlock.workers.pace import Kind, Pace
from interlock.workers.process import Ears
from interlock.workers.work_pool import Desk, WorkPool

log = structlog.get_logger()

LOOK_SECONDS: Final = 0.2
HOARD_SECONDS: Final = 2.0
"""When every place is taken for that long, what waits here is given back for other workers."""
SPENT_SECONDS: Final = 1800.0
"""How long a spent driver may go on for the tasks it has; then they are given back."""
RETIRE_SECONDS: Final = 15.0
RESTART_FIRST_SECONDS: Final = 0.05
RESTART_CAP_SECONDS: Final = 5.0
LIVED_SECONDS: Final = 10.0
"""A driver that lived this long is followed by the next at once."""
MOST_PER_CALL: Final = 100
MAPPED_TASKS: Final = 200
"""Of an operator that takes many at once, so many are for one place."""

Ask = Callable[[DataRequest], Awaitable[DataReply]]

_gone = (Fenced.default_code, NotFound.default_code)


class DriverPool(WorkPool):
    """`tasks` run at once. Nothing is claimed ahead: while one place is filled anew, the others keep Spark busy."""

    def __init__(
        self,
        launch: DriverLaunch,
        pace: Pace,
        desk: Desk,
        usual_lease: float,
        ask: Ask,
        *,
        per_org: bool = False,
        most_drivers: int = 4,
    ) -> None:
        super().__init__(pace, desk, usual_lease, outbound=launch.outbound, variables=launch.variables)
        self._launch, self._ask = launch, ask
        self._per_org, self._most_drivers = per_org, most_drivers
        self._tasks = launch.options.tasks
        self._lives: set[asyncio.Task[None]] = set()
        self._asks: set[asyncio.Task[None]] = set()
        self._starting: set[str] = set()
        self._crowded = False
        """A key waits for a driver, and all that there may be are at work for others."""
        self._pause = 0.0
        self._full_since = math.inf
        self._asking: dict[int, Held] = {}
        """The dispatcher is being asked about them."""
        self.drivers: list[DriverProcess] = []

    # How much to claim

    def room(self, kind: Kind | None) -> int:
        if self._draining.is_set():
            return 0
        free = max(self._tasks - _places(self.held.values()), 0)
        return max(round(free / self.claim_seconds(kind)) - self._reserved_tasks(kind), 0)

    def claim_seconds(self, kind: Kind | None) -> float:
        """What is reserved is counted in places."""
        return 1 / MAPPED_TASKS if kind is not None and kind[0] == SPARK_MAP else 1.0

    # Claimed tasks come in

    def take(self, reply: ClaimBatchReply) -> int:
        taken = self._claimed(reply)
        if self._draining.is_set():
            self._release(taken)
            return len(taken)
        for held in taken:
            self.held[held.slot] = held
        self.queue.extend(taken)
        self.feed()
        return len(taken)

    def feed(self) -> None:
        if self._draining.is_set():
            return
        self._crowded = False
        batch: list[Held] = []
        waiting: deque[Held] = deque()
        while self.queue and self._busy() + len(batch) < self._tasks:
            held = self.queue.popleft()
            if held.ended:
                continue
            driver = self._driver(self._key(held))
            if driver is None:
                self._start_driver(self._key(held))
                waiting.append(held)
            elif held.kind[0] == SPARK_MAP:
                driver.assign_together([held, *self._claimed_with(held)])
            else:
                batch.append(held)
        self.queue.extendleft(reversed(waiting))
        for at in range(0, len(batch), MOST_PER_CALL):
            some = batch[at : at + MOST_PER_CALL]
            self._asking |= {held.slot: held for held in some}
            self._begin(self._asks, self._ask_and_assign(some))

    def _key(self, held: Held) -> str:
        if held.kind[0] in ON_STATE:
            return PLATFORM
        return str(held.lease.org_id) if self._per_org else ""

    def _claimed_with(self, first: Held) -> list[Held]:
        """Those that wait here. They read and write nothing that the dispatcher would have to tell."""
        others = [held for held in self.queue if held.lease is first.lease and not held.ended]
        self.queue = deque(held for held in self.queue if held.lease is not first.lease)
        return others

    def _busy(self) -> int:
        return len(self._asking) + sum(_places(driver.assigned.values()) for driver in self.drivers)

    def _driver(self, key: str) -> DriverProcess | None:
        """The one that takes new work of a key."""
        return next((one for one in self._lively() if one.ready and one.key == key), None)

    def _lively(self) -> list[DriverProcess]:
        return [one for one in self.drivers if not one.spent and one.stopping is None]

    async def _ask_and_assign(self, batch: list[Held]) -> None:
        found: dict[object, TaskData | Refusal] = {}
        try:
            reply = await self._ask(DataRequest(items=[held.release() for held in batch]))
            found |= {one.task_id: one for one in reply.items}
            found |= {one.task_id: one for one in reply.refused}
        except (Unauthenticated, Forbidden):
            raise
        except InterlockError as error:
            found |= {one.task_id: Refusal(task_id=one.task_id, code=error.code, detail=error.detail) for one in batch}
        finally:
            asked = [held for held in batch if self._asking.pop(held.slot, None) is not None and not held.ended]
        for held in asked:
            self._go_on(held, found.get(held.task_id))
        self.feed()
        self.room_made.set()

    def _go_on(self, held: Held, data: TaskData | Refusal | None) -> None:
        driver = self._driver(self._key(held))
        if data is None or (isinstance(data, Refusal) and data.code in _gone):
            self.lose(held)
        elif isinstance(data, Refusal):
            self._drop(held)
            self._end(held, held.failed("DataRefused", f"The dispatcher tells nothing to work on: {data.detail}"))
        elif driver is None:
            self.queue.appendleft(held)
        else:
            driver.assign(held, data)

    # Reports come in

    def heard(self, driver: DriverProcess, messages: list[protocol.ToWrapper]) -> None:
        for message in messages:
            self._heard_one(driver, message)
        if self._draining.is_set() or driver.spent:
            self._retire_idle()
        self.feed()
        self.room_made.set()

    def _heard_one(self, driver: DriverProcess, message: protocol.ToWrapper) -> None:
        match message:
            case protocol.Finished() | protocol.Raised() | protocol.Stopped():
                # A thread that nobody waits for any more may answer after all.
                if (held := driver.assigned.pop(message.slot, None)) is not None:
                    self._answered(held, message)
            case protocol.Progressed():
                self._progressed(message)
            case protocol.Emit():
                self._emit(driver, message)
            case protocol.Printed():
                self._show(driver, message.slot, message.stream, message.line)
            case protocol.Ready():
                driver.ready, self._failed_starts = True, 0
            case protocol.Spent():
                log.warning("worker.spark_ended", pid=driver.pid, reason=message.reason)
                driver.spend()
            case protocol.SparkDied():
                driver.spark_died(message.returncode)

    def _answered(self, held: Held, message: protocol.Finished | protocol.Raised | protocol.Stopped) -> None:
        self._drop(held)
        match message:
            case protocol.Finished():
                self._pace.learn(held.kind, message.seconds)
                self._finished(held, message)
            case protocol.Raised():
                self._end(held, held.failed(message.error_class, message.message))
            case protocol.Stopped():
                self._end(held, held.canceled())

    def printed(self, driver: DriverProcess, line: str) -> None:
        """A line that came past Python, mostly from the JVM: it may be about any of the tasks."""
        self._show(driver, 0, "raw", line)

    # Tasks end otherwise

    def _stop(self, held: Held) -> bool:
        driver = self._driver_of(held)
        if driver is not None:
            driver.stop(held)
        return driver is not None

    def pause(self, held: Held, paused: bool) -> None:
        driver = self._driver_of(held)
        if held.paused != paused and driver is not None:
            held.paused = paused
            driver.hold(held)

    def _driver_of(self, held: Held) -> DriverProcess | None:
        return next((driver for driver in self.drivers if held.slot in driver.assigned), None)

    # Drivers come and go

    def _start_driver(self, key: str) -> None:
        if key in self._starting or any(one.key == key for one in self._lively()):
            return
        # A spent driver that still works for others is left out: the next one has always been started beside it.
        alive = sum(1 for one in self.drivers if not (one.spent and one.assigned))
        if alive + len(self._starting) >= self._most_drivers:
            self._stop_idle()
            return
        self._starting.add(key)
        self._begin(self._lives, self._live_through_one(key))

    def _stop_idle(self) -> None:
        """Stop the driver that was used least recently. The one that waits is started when it has ended."""
        if any(one.spent and not one.assigned for one in self.drivers):
            return
        asking = {self._key(held) for held in self._asking.values()}
        idle = [one for one in self._lively() if one.ready and not one.assigned and one.key not in asking]
        if not idle:
            self._crowded = True
            return
        oldest = min(idle, key=lambda one: one.used_at)
        log.info("worker.driver_idle_stopped", pid=oldest.pid)
        oldest.spend()
        oldest.retire()

    def _begin(self, works: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            works.discard(task)
            if not task.cancelled() and (error := task.exception()):
                self._desk.fail(error)

        task = asyncio.create_task(work)
        works.add(task)
        task.add_done_callback(ended)

    async def _live_through_one(self, key: str) -> None:
        try:
            await self._drained_within(self._pause)
            if self._draining.is_set():
                return
            began = time.monotonic()
            driver = await driver_process.start(self._launch, Ears(self.heard, self.printed), key)
        finally:
            self._starting.discard(key)
        log.info("worker.driver_started", pid=driver.pid)
        self.drivers.append(driver)
        self.feed()  # it may have reported that it is ready before it was in the list
        if self._draining.is_set():
            driver.retire()
        try:
            cause, sentence = await driver.ended()
        finally:
            self.drivers.remove(driver)
        lived = time.monotonic() - began > LIVED_SECONDS
        self._pause = 0.0 if lived else min(max(2 * self._pause, RESTART_FIRST_SECONDS), RESTART_CAP_SECONDS)
        self._bury(driver, cause, sentence)

    async def _drained_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    def _bury(self, driver: DriverProcess, cause: Crash, sentence: str) -> None:
        log.info("worker.driver_ended", pid=driver.pid, exit_code=cause.exit_code, signal=cause.signal, oom=cause.oom)
        if not driver.ready and not self._draining.is_set():
            self._start_failed("driver", cause)
        orphans = list(driver.assigned.values())
        driver.assigned.clear()
        if driver.stopping is not None:
            # Killed by us and not on their account: given back, they cost no attempt.
            self._release(orphans)
        for held in orphans if driver.stopping is None else ():
            log.warning("worker.driver_crashed", task_id=str(held.task_id), pid=driver.pid, reason=sentence)
            self._drop(held)
            self._end(held, held.canceled() if held.cancel else held.failed("WorkerCrashed", sentence, cause))
        self.feed()
        self.room_made.set()

    # Looks after what takes too long

    async def watch(self, grace: float) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look(grace)

    def look(self, grace: float) -> None:
        """At the hard timeout a task is stopped and nothing is said about it: the dispatcher's clock decides."""
        for driver in self.drivers:
            for held in list(driver.assigned.values()):
                self._look_at(driver, held, grace)
        self._retire_idle()
        self._give_back_hoard()

    def _look_at(self, driver: DriverProcess, held: Held, grace: float) -> None:
        if held.cancel or held.lost:
            if time.monotonic() - held.stop_asked_at > grace:
                log.warning("worker.cancel_ignored", task_id=str(held.task_id), grace_seconds=grace)
                self._leave_behind(driver, held)
        elif held.seconds_to_timeout() <= 0:
            log.warning("worker.task_timed_out", task_id=str(held.task_id), attempt=held.attempt)
            held.lost, held.stop_asked_at = True, time.monotonic()
            driver.stop(held)

    def _leave_behind(self, driver: DriverProcess, held: Held) -> None:
        """Its thread does not stop, and cannot be killed alone."""
        del driver.assigned[held.slot]
        driver.zombies += 1
        driver.spend()
        self._drop(held)
        if held.cancel:
            self._end(held, held.canceled())
        self.feed()
        self.room_made.set()

    def _retire_idle(self) -> None:
        now = time.monotonic()
        for driver in self.drivers:
            if driver.spent_since is not None and now - driver.spent_since > SPENT_SECONDS:
                driver.kill("spent")
            elif driver.assigned or not (driver.spent or self._draining.is_set()):
                continue
            elif driver.zombies or (driver.retired_at is not None and now - driver.retired_at > RETIRE_SECONDS):
                driver.kill("spent")
            else:
                driver.retire()

    def _give_back_hoard(self) -> None:
        now = time.monotonic()
        if not self.queue or (self._busy() < self._tasks and not self._crowded):
            self._full_since = math.inf
        else:
            self._full_since = min(self._full_since, now)
            if now - self._full_since > HOARD_SECONDS:
                self.release_queue()

    # The end

    def drain(self) -> None:
        self._draining.set()
        self.release_queue()
        self._release([held for held in self._asking.values() if not held.ended])
        for ask in self._asks:
            ask.cancel()
        self._retire_idle()
        self.room_made.set()

    def kill_all(self) -> None:
        for ask in self._asks:
            ask.cancel()
        for driver in self.drivers:
            driver.kill("drain")

    async def ended(self) -> None:
        while works := self._lives | self._asks:
            await asyncio.wait(works)


def _places(tasks: Iterable[Held]) -> int:
    """One for each, and one for all that were claimed together of an operator that takes many at once."""
    alone, together = 0, set()
    for held in tasks:
        if held.kind[0] == SPARK_MAP:
            together.add(id(held.lease))
        else:
            alone += 1
    return alone + len(together)
