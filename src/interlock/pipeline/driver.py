"""The process that runs tasks on Spark: `python -m interlock.pipeline.driver`, started by the wrapper alone.

    main thread        reads what the wrapper says, and does nothing that could keep it from the next word
    a thread per task  runs one attempt, under a job group of its own
    writer             writes all reports: a task's thread may be interrupted anywhere, and would tear a frame
    starter, watcher   start the session with the first task; end this process when its JVM is gone
    poller             tells what Spark is doing for tasks that take long

Like a child of another worker it holds no token. Its tasks share its fate: what ends the process ends them all.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from interlock.pipeline import operators, session
from interlock.pipeline.failures import SparkStopped
from interlock.pipeline.running import WAIT_STEP_SECONDS, Pools, Running, ThreadLines, job_of
from interlock.wire import Event, Output, TaskData
from interlock.workers import catalogue, confinement, protocol
from interlock.workers.context import PROGRESS_TEXT, TaskCanceled, TaskFailed, plain
from interlock.workers.exits import EXIT_ORPHANED, EXIT_SPARK_DIED
from interlock.workers.inside import die_with, encoded, raised, wait_for_the_wrapper
from interlock.workers.operators import SPARK_MAP

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

READ: Final = 1 << 18
POLL_SECONDS: Final = 1.0
DEATH_SECONDS: Final = 3.0
"""From the first failed call into a JVM that dies until the kernel says so."""
STOP_SECONDS: Final = 5.0

T = TypeVar("T")
Answer = protocol.Finished | protocol.Raised | protocol.Stopped

_data = msgspec.json.Decoder(TaskData)


class Driver:
    def __init__(self, work: int, reports: int, result_limit: int, scratch: Path) -> None:
        self._work, self._reports = work, reports
        self._result_limit, self._scratch = result_limit, scratch
        self._frames = protocol.for_driver()
        self._outbox: SimpleQueue[protocol.ToWrapper] = SimpleQueue()
        self._options: protocol.SparkOptions | None = None
        self._pools = Pools([])
        self._running: dict[int, Running] = {}
        self._session: Future[session.Session] | None = None
        self._died = threading.Event()
        self._spent = False
        self._of_thread = threading.local()

    def serve(self) -> None:
        self._thread("writer", self._write_reports)
        self.report(protocol.Ready())
        while data := os.read(self._work, READ):
            for message in self._frames.feed(data):
                self._heard(message)
        self._end()

    def _thread(self, name: str, target: Any, *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _heard(self, message: protocol.ToDriver) -> None:
        match message:
            case protocol.Assign() if message.work.operator == SPARK_MAP:
                self._begin_together(message.work, message.tasks)
            case protocol.Assign():
                for task in message.tasks:
                    self._begin(message.work, task)
            case protocol.Stop():
                self._stop(message.slot)
            case protocol.Hold():
                if (running := self._running.get(message.slot)) is not None:
                    running.paused = message.paused
            case protocol.EmitAnswered():
                if (running := self._running.get(message.slot)) is not None:
                    running.answers.put(message)
            case protocol.SparkOptions():
                self._options = message
                self._pools = Pools(session.pool_names(message.tasks))

    # The session

    def _begin(self, work: protocol.Work, task: protocol.Assignment) -> None:
        running = self._entered(work, task)
        self._thread(f"task-{running.slot}", self._run, running)

    def _begin_together(self, work: protocol.Work, tasks: list[protocol.Assignment]) -> None:
        company = [self._entered(work, task) for task in tasks]
        for running in company:
            running.company = company
        self._thread(f"tasks-{company[0].slot}", self._run_together, company)

    def _entered(self, work: protocol.Work, task: protocol.Assignment) -> Running:
        if self._session is None:
            self._session = Future()
            self._thread("starter", self._start_session, self._session)
        running = self._running[task.slot] = Running(work, task, self._pools.enter(job_of(work)))
        return running

    def _start_session(self, started: Future[session.Session]) -> None:
        """In a thread of its own: a task that is canceled meanwhile must not take the start with it."""
        try:
            if self._options is None:
                raise RuntimeError("a driver is told its options before its first task")
            found = session.start(self._options, self._scratch)
        except BaseException as error:
            self._spend(str(error))
            started.set_exception(error)
            return
        started.set_result(found)
        self._thread("watcher", self._watch, found)
        self._thread("poller", self._poll, found)

    def _spend(self, reason: str) -> None:
        if not self._spent:
            self._spent = True
            self.report(protocol.Spent(plain(reason, PROGRESS_TEXT)))

    def _watch(self, watched: session.Session) -> None:
        returncode = watched.wait_for_death()
        self._died.set()
        self.report(protocol.SparkDied(returncode))

    def _end(self) -> NoReturn:
        """The wrapper wants no more of it, or is gone."""
        found = self._session
        if found is not None and found.done() and found.exception() is None:
            stopping = threading.Thread(target=found.result().stop, daemon=True)
            stopping.start()
            stopping.join(STOP_SECONDS)
        os._exit(0)

    # One task

    def _run(self, running: Running) -> None:
        """The thread of one task. It may be interrupted at any place: it would rather answer twice than not at all."""
        answer: Answer | None = protocol.Stopped(running.slot)
        try:
            self._of_thread.slot = running.slot
            running.thread = threading.get_ident()
            if not running.canceled:
                answer = self._attempted(running)
            running.thread = None
        except TaskCanceled:
            answer = protocol.Stopped(running.slot)
        while answer is not None and not running.answered:
            try:
                self._flush_prints()
                self.report(answer)
                running.answered = True
            except TaskCanceled:
                continue

    def _attempted(self, running: Running) -> Answer | None:
        """How the attempt ended; None when the whole process is about to."""
        began = time.perf_counter()
        found: session.Session | None = None
        try:
            found = self._started_session()
            value, outputs, events = self._in_session(found, running, _attempt)
            result = encoded(value, self._result_limit)
        except TaskCanceled:
            raise
        except BaseException as error:
            if running.canceled:
                return protocol.Stopped(running.slot)
            seconds = time.perf_counter() - began
            return self._failed(running, seconds, error, found)
        return protocol.Finished(running.slot, time.perf_counter() - began, result, events, outputs)

    # Many tasks at once

    def _run_together(self, company: list[Running]) -> None:
        """The one thread of all of them, which the first one stands for. Each is answered by itself."""
        answers: list[Answer] = []
        first = company[0]
        try:
            self._of_thread.slot = first.slot
            first.thread = threading.get_ident()
            answers = self._attempted_together(company)
            first.thread = None
        except TaskCanceled:
            answers = [protocol.Stopped(running.slot) for running in company]
        while answers:
            try:
                self._flush_prints()
                self.report(answers[-1])
                answers.pop()
            except TaskCanceled:
                continue

    def _attempted_together(self, company: list[Running]) -> list[Answer]:
        """None of them when the whole process is about to end."""
        began = time.perf_counter()
        found: session.Session | None = None
        try:
            found = self._started_session()
            outcomes = self._in_session(found, company[0], _attempt_together)
        except TaskCanceled:
            raise
        except BaseException as error:
            failed = self._failed(company[0], time.perf_counter() - began, error, found)
            return [] if failed is None else [msgspec.structs.replace(failed, slot=one.slot) for one in company]
        seconds = (time.perf_counter() - began) / len(company)
        return [self._outcome(running, seconds, outcomes.get(running.slot)) for running in company]

    def _outcome(self, running: Running, seconds: float, outcome: object) -> Answer:
        try:
            if isinstance(outcome, TaskFailed):
                raise outcome
            result = encoded(outcome, self._result_limit)
        except TaskFailed as error:
            return raised(running.slot, seconds, error)
        return protocol.Finished(running.slot, seconds, result, [], [])

    def _started_session(self) -> session.Session:
        if self._session is None:
            raise RuntimeError("a task begins after the session's start has begun")
        while not self._session.done():
            wait([self._session], timeout=WAIT_STEP_SECONDS)
        error = self._session.exception()
        if isinstance(error, TaskFailed):
            raise TaskFailed(str(error), error.error_class)
        return self._session.result()

    def _in_session(
        self, found: session.Session, running: Running, attempt: Callable[[SparkSession, Running, Driver], T]
    ) -> T:
        if not found.usable():
            raise SparkStopped("The session was stopped by a task that ran before: the next attempt gets a new one.")
        try:
            return attempt(found.for_task(running.group, running.pool, running.about), running, self)
        finally:
            _release(found, running.group)

    def _failed(
        self, running: Running, seconds: float, error: BaseException, found: session.Session | None
    ) -> protocol.Raised | None:
        """A failure that has the session's end as its cause must not pass for one of the operator's."""
        if found is None or found.usable():
            return raised(running.slot, seconds, error)
        if self._died.wait(DEATH_SECONDS):
            return None
        self._spend("The session was stopped by an operator.")
        if not isinstance(error, TaskFailed):
            error = SparkStopped("The session was stopped while this task ran in it: the next attempt gets a new one.")
        return raised(running.slot, seconds, error)

    def _stop(self, slot: int) -> None:
        running = self._running.get(slot)
        if running is not None and not running.canceled:
            running.canceled = True
            self._thread(f"stop-{slot}", self._interrupt, running)

    def _interrupt(self, running: Running) -> None:
        """The exception first: it is there already when Spark gives the thread back."""
        if running.company:
            if not all(one.canceled for one in running.company):
                # The others go on; what comes of this one is not asked for any more.
                self.report(protocol.Stopped(running.slot))
                return
            running = running.company[0]
        running.interrupt()
        found = self._session
        if found is not None and found.done() and found.exception() is None:
            found.result().cancel(running.group)

    # What operators ask for (see context.Link)

    def progress(self, slot: int, fraction: float, text: str | None) -> None:
        if (running := self._running.get(slot)) is not None:
            running.said = text
        self.report(protocol.Progressed(slot, fraction, text))

    def emit(self, slot: int, events: list[Event]) -> int:
        running = self._running[slot]
        if threading.get_ident() != running.thread:
            raise RuntimeError("call ctx.emit from the thread that runs the operator")
        self.report(protocol.Emit(slot, events))
        answer = running.answer_of_emit()
        if answer.problem is not None:
            raise TaskFailed(answer.problem, "EmitRefused")
        return answer.accepted

    def canceled(self, slot: int) -> bool:
        running = self._running.get(slot)
        return running is None or running.canceled

    def paused(self, slot: int) -> bool:
        running = self._running.get(slot)
        return running is not None and running.paused

    # Reports

    @property
    def slot(self) -> int:
        """The task whose thread asks; 0 for a thread that an operator started."""
        slot: int = getattr(self._of_thread, "slot", 0)
        return slot

    def report(self, message: protocol.ToWrapper) -> None:
        self._outbox.put(message)

    @staticmethod
    def _flush_prints() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    def _write_reports(self) -> None:
        while True:
            message = self._outbox.get()
            if isinstance(message, Answer) and not self._first_answer(message):
                continue
            self._write(protocol.frame(message))
            if isinstance(message, protocol.SparkDied):
                os._exit(EXIT_SPARK_DIED)

    def _first_answer(self, answer: Answer) -> bool:
        running = self._running.pop(answer.slot, None)
        if running is not None:
            self._pools.leave(job_of(running.work))
        return running is not None

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._reports, data) :]
        except OSError:
            os._exit(EXIT_ORPHANED)

    # Progress

    def _poll(self, watched: session.Session) -> None:
        while not self._died.wait(POLL_SECONDS) and watched.usable():
            now = time.monotonic()
            for running in list(self._running.values()):
                if now - running.since >= POLL_SECONDS:
                    self._show_stage(watched, running)

    def _show_stage(self, watched: session.Session, running: Running) -> None:
        stage = watched.stage(running.group)
        if stage is not None and stage != running.shown:
            running.shown = stage
            text = stage if running.said is None else f"{running.said}; {stage}"
            self.report(protocol.Progressed(running.slot, None, plain(text, PROGRESS_TEXT)))


def _release(found: session.Session, group: str) -> None:
    """Gives the session back, also when the cancel of the task arrives just now: a cancel is raised once."""
    try:
        found.release(group)
    except TaskCanceled:
        found.release(group)
        raise


def _attempt(spark: SparkSession, running: Running, link: Driver) -> tuple[object, list[Output], list[Event]]:
    from interlock.pipeline.attempt import run_attempt  # noqa: PLC0415 - loads PySpark: with the first task
    from interlock.pipeline.context import TaskContext  # noqa: PLC0415

    work, task = running.work, running.task
    nothing = TaskData(task_id=task.task_id, inputs=[], outputs=[])
    data = nothing if work.data is None else _data.decode(work.data)
    context = TaskContext(work, task, link, spark, data)
    return run_attempt(spark, context, data, context.payload)


def _attempt_together(spark: SparkSession, first: Running, link: Driver) -> dict[int, object]:
    from interlock.pipeline.context import TaskContext  # noqa: PLC0415 - as above
    from interlock.pipeline.spark_map import run_together  # noqa: PLC0415

    nothing = TaskData(task_id=first.task.task_id, inputs=[], outputs=[])
    context = TaskContext(first.work, first.task, link, spark, nothing)
    return run_together(spark, context, [running.task for running in first.company])


def _show_no_cancel(arguments: threading.ExceptHookArgs) -> None:
    """A cancel may reach a thread that has just answered: then nobody is left to hear of it."""
    if not issubclass(arguments.exc_type, TaskCanceled):
        threading.__excepthook__(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="interlock.pipeline.driver")
    for name in ("--work", "--reports", "--parent", "--result-limit"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--operators", action="append", default=[])
    parser.add_argument("--hidden", action="append", default=[], type=Path)
    parser.add_argument("--kept", action="append", default=[], type=Path)
    parser.add_argument("modules", nargs="*")
    return parser.parse_args()


def main() -> NoReturn:
    asked = _arguments()
    die_with(asked.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait_for_the_wrapper)
    for descriptor in (asked.work, asked.reports):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=2)
    threading.excepthook = _show_no_cancel
    driver = Driver(asked.work, asked.reports, asked.result_limit, asked.scratch)
    sys.stdout, sys.stderr = ThreadLines(driver, "stdout"), ThreadLines(driver, "stderr")
    confinement.confine(asked.hidden, asked.kept)
    given = catalogue.sources(asked.operators)
    catalogue.extend_search_path(given)
    operators.give(given)
    for module in asked.modules:
        importlib.import_module(module)
    driver.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
