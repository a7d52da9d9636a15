"""The pool for tasks on Spark: driver processes with one session each, in which tasks run concurrently.

    queue ─► request the task's data (inputs and outputs) from the dispatcher ─► driver ─► answers

A driver is started with the first task, and a new one when it is gone. A driver whose session has ended, or in which a
thread did not stop, is spent: it gets no new tasks, the next driver is started alongside it, and it is ended after its
remaining tasks. A task therefore cannot harm the others, short of killing the process that they share.

Every task has a key, and tasks of different keys never share a driver. Tasks of the platform that get the URL of the
state database have their own key; so have tasks of one org that get secrets or variables, and with
`spark_driver_per_org` all tasks of one org. The number of drivers is limited. If another key needs a driver, the one
that has been idle for the longest time is stopped.
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
from interlock.wire.attempts import ClaimBatchReply, DataReply, DataRequest, Refusal, TaskData
from interlock.wire.tasks import Crash
from interlock.workers import driver_process, protocol
from interlock.workers.claimed_tasks import Held, Kind, Pace
from interlock.workers.driver_process import PLATFORM, DriverLaunch, DriverProcess
from interlock.workers.operators import ON_STATE, SPARK_MAP
from interlock.workers.process import Handlers
from interlock.workers.work_pool import ReportSink, WorkPool

log = structlog.get_logger()

LOOK_SECONDS: Final = 0.2
HOARD_SECONDS: Final = 2.0
"""If all permits are taken for this long, the queue is released to other workers."""
SPENT_SECONDS: Final = 1800.0
"""Time that a spent driver has for its remaining tasks. Then they are released."""
RETIRE_SECONDS: Final = 15.0
RESTART_FIRST_SECONDS: Final = 0.05
RESTART_CAP_SECONDS: Final = 5.0
LIVED_SECONDS: Final = 10.0
"""A driver that lived this long is replaced without a backoff."""
MAX_PER_CALL: Final = 100
MAPPED_TASKS: Final = 200
"""Tasks per permit, for an operator that takes a batch of tasks."""

Ask = Callable[[DataRequest], Awaitable[DataReply]]

_gone = (Fenced.default_code, NotFound.default_code)


class DriverPool(WorkPool):
    """Runs up to `tasks` tasks concurrently. No task is claimed ahead: while one ends, the others keep Spark busy."""

    def __init__(
        self,
        launch: DriverLaunch,
        pace: Pace,
        sink: ReportSink,
        usual_lease: float,
        ask: Ask,
        *,
        per_org: bool = False,
        most_drivers: int = 4,
    ) -> None:
        super().__init__(pace, sink, usual_lease, outbound=launch.outbound, variables=launch.variables)
        self._launch, self._ask = launch, ask
        self._per_org, self._most_drivers = per_org, most_drivers
        self._tasks = launch.options.tasks
        self._lives: set[asyncio.Task[None]] = set()
        self._asks: set[asyncio.Task[None]] = set()
        self._starting: set[str] = set()
        self._crowded = False
        """True if a key waits for a driver, and all allowed drivers are busy with other keys."""
        self._pause = 0.0
        self._full_since = math.inf
        self._asking: dict[int, Held] = {}
        """Tasks whose data is being requested from the dispatcher."""
        self.drivers: list[DriverProcess] = []

    # How much to claim

    def room(self, kind: Kind | None) -> int:
        if self._draining.is_set():
            return 0
        free = max(self._tasks - _permits(self.held.values()), 0)
        return max(round(free / self.claim_seconds(kind)) - self._reserved_tasks(kind), 0)

    def claim_seconds(self, kind: Kind | None) -> float:
        """Returns the permits that a task takes: reservations are counted in permits, not seconds."""
        return 1 / MAPPED_TASKS if kind is not None and kind[0] == SPARK_MAP else 1.0

    # Accepting claimed tasks

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
        for at in range(0, len(batch), MAX_PER_CALL):
            some = batch[at : at + MAX_PER_CALL]
            self._asking |= {held.slot: held for held in some}
            self._begin(self._asks, self._ask_and_assign(some))

    def _key(self, held: Held) -> str:
        if held.kind[0] in ON_STATE:
            return PLATFORM
        return str(held.lease.org_id) if self._per_org or held.lease.private else ""

    def _claimed_with(self, first: Held) -> list[Held]:
        """Takes the queued tasks of the same claim. They have no inputs and outputs to request from the dispatcher."""
        others = [held for held in self.queue if held.lease is first.lease and not held.ended]
        self.queue = deque(held for held in self.queue if held.lease is not first.lease)
        return others

    def _busy(self) -> int:
        return len(self._asking) + sum(_permits(driver.assigned.values()) for driver in self.drivers)

    def _driver(self, key: str) -> DriverProcess | None:
        """Returns the driver that accepts new tasks of a key."""
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
            self._end(
                held,
                held.failed("DataRefused", f"The dispatcher refused the inputs and outputs of the task: {data.detail}"),
            )
        elif driver is None:
            self.queue.appendleft(held)
        else:
            driver.assign(held, data)

    # Handling reports

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
                # A thread that was given up may still answer.
                if (held := driver.assigned.pop(message.slot, None)) is not None:
                    self._answered(held, message)
            case protocol.Outdated():
                self._edited(driver, message.slots)
            case protocol.Progressed():
                self._progressed(message)
            case protocol.Emit():
                self._emit(driver, message)
            case protocol.Printed() | protocol.Traced():
                self._keep(driver, message)
            case protocol.Ready():
                driver.ready, self._failed_starts = True, 0
            case protocol.Spent():
                log.warning("worker.spark_ended", pid=driver.pid, reason=message.reason)
                driver.spend()
            case protocol.SparkDied():
                driver.spark_died(message.returncode)

    def _keep(self, driver: DriverProcess, message: protocol.Printed | protocol.Traced) -> None:
        if isinstance(message, protocol.Traced):
            self._traced(driver, message)
        else:
            self._show(driver, message.slot or _only(driver), message.stream, message.line)

    def _edited(self, driver: DriverProcess, slots: list[int]) -> None:
        """Queues tasks that a driver with old code has not started. The next driver gets them."""
        log.info("worker.code_edited", pid=driver.pid)
        driver.spend()
        back = [held for slot in slots if (held := driver.assigned.pop(slot, None)) is not None]
        for held in back:
            if held.cancel or held.lost:
                self._drop(held)
                self._end(held, held.canceled())
        live = [held for held in back if not held.ended]
        if self._draining.is_set():
            self._release(live)
        else:
            self.queue.extendleft(reversed(live))

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
        """Logs a line that was not written through Python's streams, mostly by the JVM. It may concern any task."""
        self._show(driver, 0, "raw", line)

    # Stopping and pausing tasks

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

    # Starting and replacing drivers

    def _start_driver(self, key: str) -> None:
        if key in self._starting or any(one.key == key for one in self._lively()):
            return
        # A spent driver that still has tasks does not count: its successor is always started alongside it.
        alive = sum(1 for one in self.drivers if not (one.spent and one.assigned))
        if alive + len(self._starting) >= self._most_drivers:
            self._stop_idle()
            return
        self._starting.add(key)
        self._begin(self._lives, self._run_one_driver(key))

    def _stop_idle(self) -> None:
        """Stops the least recently used idle driver. The driver for the waiting key is started when it has ended."""
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
                self._sink.fail(error)

        task = asyncio.create_task(work)
        works.add(task)
        task.add_done_callback(ended)

    async def _run_one_driver(self, key: str) -> None:
        try:
            await self._drained_within(self._pause)
            if self._draining.is_set():
                return
            began = time.monotonic()
            driver = await driver_process.start(self._launch, Handlers(self.heard, self.printed), key)
        finally:
            self._starting.discard(key)
        log.info("worker.driver_started", pid=driver.pid)
        self.drivers.append(driver)
        self.feed()  # the driver may have reported that it is ready before it was in the list
        if self._draining.is_set():
            driver.retire()
        try:
            cause, sentence = await driver.ended()
        finally:
            self.drivers.remove(driver)
        lived = time.monotonic() - began > LIVED_SECONDS
        self._pause = 0.0 if lived else min(max(2 * self._pause, RESTART_FIRST_SECONDS), RESTART_CAP_SECONDS)
        self._clean_up(driver, cause, sentence)

    async def _drained_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    def _clean_up(self, driver: DriverProcess, cause: Crash, sentence: str) -> None:
        log.info("worker.driver_ended", pid=driver.pid, exit_code=cause.exit_code, signal=cause.signal, oom=cause.oom)
        if not driver.ready and not self._draining.is_set():
            self._start_failed("driver", cause)
        orphans = list(driver.assigned.values())
        driver.assigned.clear()
        if driver.stopping is not None:
            # This worker killed the driver for other reasons, so the tasks are released, which costs no attempt.
            self._release(orphans)
        for held in orphans if driver.stopping is None else ():
            log.warning("worker.driver_crashed", task_id=str(held.task_id), pid=driver.pid, reason=sentence)
            self._drop(held)
            self._end(held, held.canceled() if held.cancel else held.failed("WorkerCrashed", sentence, cause))
        self.feed()
        self.room_made.set()

    # Watching for tasks that take too long

    async def watch(self, grace: float) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look(grace)

    def look(self, grace: float) -> None:
        """Enforces timeouts and cancels.

        At the hard timeout a task is stopped without a report, since the dispatcher's clock decides.
        """
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
        """Gives up a task whose thread does not stop. A thread cannot be killed, so the driver is spent."""
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

    # Draining

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


def _only(driver: DriverProcess) -> int:
    """Returns the slot of the only task, to which the output of threads that it started belongs; else 0."""
    return next(iter(driver.assigned)) if len(driver.assigned) == 1 else 0


def _permits(tasks: Iterable[Held]) -> int:
    """Returns the permits that tasks take: one each, and one for all tasks of a claim that run as one batch."""
    alone, together = 0, set()
    for held in tasks:
        if held.kind[0] == SPARK_MAP:
            together.add(id(held.lease))
        else:
            alone += 1
    return alone + len(together)
