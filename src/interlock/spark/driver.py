"""The process that runs tasks on Spark: `python -m interlock.spark.driver`. Only the wrapper starts it.

    main thread        reads messages from the wrapper, and never blocks on anything else
    a thread per task  runs one attempt, under its own Spark job group
    writer             writes all reports: a cancel can interrupt a task's thread anywhere, and would tear a frame
    starter, watcher   start the session with the first task; end this process when its JVM is gone
    poller             reports Spark's progress for tasks that run long

Like the child process of any other worker, it holds no token. If the process ends, all its tasks end with it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from interlock.processes import linux
from interlock.spark import operators, session
from interlock.wire.attempts import Event, Output, TaskData
from interlock.workers import catalogue, confinement, protocol
from interlock.workers.child_runtime import Lines, LineSink, encoded, keep_logging, raised, wait_for_the_wrapper
from interlock.workers.context import PROGRESS_TEXT, TaskCanceled, TaskFailed, plain
from interlock.workers.edits import LoadedCode
from interlock.workers.failures import SparkStopped
from interlock.workers.operators import SPARK_MAP
from interlock.workers.process import EXIT_SPARK_DIED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


WAIT_STEP_SECONDS: Final = 0.2
"""Longest single wait. A thread can be interrupted only between two waits."""


@dataclass(eq=False)
class Running:
    """One task, from its assignment until it is answered."""

    work: protocol.Work
    task: protocol.Assignment
    pool: str
    since: float = field(default_factory=time.monotonic)
    canceled: bool = False
    paused: bool = False
    progress_text: str | None = None
    """The latest progress text of the operator."""
    stage_text: str | None = None
    """The latest description of Spark's stage that was reported."""
    answers: SimpleQueue[protocol.EmitAnswered] = field(default_factory=SimpleQueue)
    thread: int | None = None
    """The thread that may be interrupted, while there is one."""
    batch: list[Running] = field(default_factory=list, repr=False)
    """All tasks that run in one thread, including this one. `thread` is set on the first of them."""

    @property
    def slot(self) -> int:
        return self.task.slot

    @property
    def group(self) -> str:
        """Name of its job group in Spark."""
        return f"{self.task.task_id}/{self.work.attempt}/{self.slot}"

    @property
    def about(self) -> str:
        dag, job = self.work.job
        return f"{dag or 'run'}/{job or self.work.operator} {self.task.task_id} attempt {self.work.attempt}"

    def answer_of_emit(self) -> protocol.EmitAnswered:
        while True:
            try:
                return self.answers.get(timeout=WAIT_STEP_SECONDS)
            except Empty:
                continue

    def interrupt(self) -> None:
        """Raises TaskCanceled in the operator as soon as it executes Python code again."""
        if self.thread is not None:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self.thread), ctypes.py_object(TaskCanceled))


class Pools:
    """Assigns each job with running tasks one of a fixed number of Spark's scheduler pools.

    Jobs then share the cores evenly, however many tasks each of them runs.
    """

    def __init__(self, names: list[str]) -> None:
        self._free = list(reversed(names))
        self._used: dict[Hashable, tuple[str, int]] = {}
        self._changing = threading.Lock()

    def enter(self, job: Hashable) -> str:
        with self._changing:
            name, tasks = self._used.get(job) or (self._free.pop() if self._free else "default", 0)
            self._used[job] = name, tasks + 1
        return name

    def leave(self, job: Hashable) -> None:
        with self._changing:
            name, tasks = self._used.pop(job)
            if tasks > 1:
                self._used[job] = name, tasks - 1
            elif name != "default":
                self._free.append(name)


def job_of(work: protocol.Work) -> Hashable:
    return work.job, work.operator, work.run_id


class ThreadLines(io.TextIOBase):
    """stdout or stderr of a process whose threads belong to different tasks."""

    def __init__(self, sink: LineSink, stream: str) -> None:
        self._sink, self._stream = sink, stream
        self._of_thread = threading.local()

    @property
    def _lines(self) -> Lines:
        found: Lines | None = getattr(self._of_thread, "lines", None)
        if found is None:
            found = self._of_thread.lines = Lines(self._sink, self._stream)
        return found

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return self._lines.write(text)

    def flush(self) -> None:
        self._lines.flush()


READ: Final = 1 << 18
POLL_SECONDS: Final = 1.0
DEATH_SECONDS: Final = 3.0
"""Longest time between the first failed call into a dying JVM and the kernel reporting its exit."""
STOP_SECONDS: Final = 5.0

Answer = protocol.Finished | protocol.Raised | protocol.Stopped
Outcome = tuple[object, list[Output], list[Event]]
"""The value that a task returned or the TaskFailed that it ends with, its outputs and its events."""

_data = msgspec.json.Decoder(TaskData)


class Driver:
    def __init__(self, work: int, reports: int, result_limit: int, scratch: Path) -> None:
        self._work, self._reports = work, reports
        self._result_limit, self._scratch = result_limit, scratch
        self.code: LoadedCode | None = None
        """Set if tasks must not run with code that was edited since."""
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
                self._begin(message.work, message.tasks)
            case protocol.Assign():
                for task in message.tasks:
                    self._begin(message.work, [task])
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

    def _begin(self, work: protocol.Work, tasks: list[protocol.Assignment]) -> None:
        if self.code is not None and self.code.edited():
            self.report(protocol.Outdated([task.slot for task in tasks]))
            return
        batch = [self._entered(work, task) for task in tasks]
        for running in batch:
            running.batch = batch
        self._thread(f"task-{batch[0].slot}", self._run, batch)

    def _entered(self, work: protocol.Work, task: protocol.Assignment) -> Running:
        if self._session is None:
            self._session = Future()
            self._thread("starter", self._start_session, self._session)
        running = self._running[task.slot] = Running(work, task, self._pools.enter(job_of(work)))
        return running

    def _start_session(self, started: Future[session.Session]) -> None:
        """Runs in its own thread, so that canceling the first task does not abort the start."""
        try:
            if self._options is None:
                raise RuntimeError("the wrapper must send SparkOptions before the first task")
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
        """Ends the process after the wrapper has closed its pipe or has died."""
        found = self._session
        if found is not None and found.done() and found.exception() is None:
            stopping = threading.Thread(target=found.result().stop, daemon=True)
            stopping.start()
            stopping.join(STOP_SECONDS)
        os._exit(0)

    # A task, or a batch of tasks in one Spark job, which its first task represents

    def _run(self, batch: list[Running]) -> None:
        """Body of the thread of a batch.

        A cancel can interrupt it anywhere, so it may answer twice but never fails to answer: `_first_answer` drops the
        second answer.
        """
        first, answers = batch[0], _stopped(batch)
        try:
            self._of_thread.slot = first.slot
            first.thread = threading.get_ident()
            if not all(running.canceled for running in batch):
                answers = self._attempted(batch)
            first.thread = None
        except TaskCanceled:
            answers = _stopped(batch)
        while answers:
            try:
                self._flush_prints()
                self.report(answers[-1])
                answers.pop()
            except TaskCanceled:
                continue

    def _attempted(self, batch: list[Running]) -> list[Answer]:
        """Returns an answer per task, or an empty list if the whole process is about to end."""
        began = time.perf_counter()
        found: session.Session | None = None
        try:
            found = self._started_session()
            outcomes = self._in_session(found, batch)
        except TaskCanceled:
            raise
        except BaseException as error:
            if all(running.canceled for running in batch):
                return _stopped(batch)
            failed = self._failed(batch[0], time.perf_counter() - began, error, found)
            return [] if failed is None else [msgspec.structs.replace(failed, slot=one.slot) for one in batch]
        seconds = (time.perf_counter() - began) / len(batch)
        return [self._answer(running, seconds, *outcomes[running.slot]) for running in batch]

    def _answer(
        self, running: Running, seconds: float, value: object, outputs: list[Output], events: list[Event]
    ) -> Answer:
        try:
            if isinstance(value, TaskFailed):
                raise value
            result = encoded(value, self._result_limit)
        except TaskFailed as error:
            return raised(self, running.slot, seconds, error)
        return protocol.Finished(running.slot, seconds, result, events, outputs)

    def _started_session(self) -> session.Session:
        if self._session is None:
            raise RuntimeError("a task was started before the start of the session")
        while not self._session.done():
            wait([self._session], timeout=WAIT_STEP_SECONDS)
        error = self._session.exception()
        if isinstance(error, TaskFailed):
            raise TaskFailed(str(error), error.error_class)
        return self._session.result()

    def _in_session(self, found: session.Session, batch: list[Running]) -> dict[int, Outcome]:
        if not found.usable():
            raise SparkStopped(
                "An earlier task stopped the shared Spark session: the next attempt gets a new one. Remove "
                "spark.stop() from the operator that calls it."
            )
        first = batch[0]
        try:
            return _attempt(found.for_task(first.group, first.pool, first.about), batch, self)
        finally:
            _release(found, first.group)

    def _failed(
        self, running: Running, seconds: float, error: BaseException, found: session.Session | None
    ) -> protocol.Raised | None:
        """Reports a failure. One caused by the end of the session must not be reported as the operator's."""
        if found is None or found.usable():
            return raised(self, running.slot, seconds, error)
        if self._died.wait(DEATH_SECONDS):
            return None
        self._spend("An operator stopped the Spark session.")
        if not isinstance(error, TaskFailed):
            error = SparkStopped(
                "The shared Spark session was stopped while this task ran: the next attempt gets a new one. Remove "
                "spark.stop() from the operator that calls it."
            )
        return raised(self, running.slot, seconds, error)

    def _stop(self, slot: int) -> None:
        running = self._running.get(slot)
        if running is not None and not running.canceled:
            running.canceled = True
            self._thread(f"stop-{slot}", self._interrupt, running)

    def _interrupt(self, running: Running) -> None:
        """Raises the cancel in the task's thread, then cancels its Spark jobs.

        In this order the exception is already pending when Spark returns control to the thread.
        """
        if not all(one.canceled for one in running.batch):
            # The rest of the batch continues; the result of this task is dropped.
            self.report(protocol.Stopped(running.slot))
            return
        first = running.batch[0]
        first.interrupt()
        found = self._session
        if found is not None and found.done() and found.exception() is None:
            found.result().cancel(first.group)

    # Calls from operators (see context.Link)

    def progress(self, slot: int, fraction: float, text: str | None) -> None:
        if (running := self._running.get(slot)) is not None:
            running.progress_text = text
        self.report(protocol.Progressed(slot, fraction, text))

    def emit(self, slot: int, events: list[Event]) -> int:
        running = self._running[slot]
        if threading.get_ident() != running.thread:
            raise RuntimeError("call ctx.emit from the thread that runs the operator, not from another one")
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
        """The slot of the calling thread's task; 0 in a thread that an operator started."""
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
            os._exit(linux.ORPHANED)

    # Progress

    def _poll(self, watched: session.Session) -> None:
        while not self._died.wait(POLL_SECONDS) and watched.usable():
            now = time.monotonic()
            for running in list(self._running.values()):
                if now - running.since >= POLL_SECONDS:
                    self._show_stage(watched, running)

    def _show_stage(self, watched: session.Session, running: Running) -> None:
        stage = watched.stage(running.group)
        if stage is not None and stage != running.stage_text:
            running.stage_text = stage
            text = stage if running.progress_text is None else f"{running.progress_text}; {stage}"
            self.report(protocol.Progressed(running.slot, None, plain(text, PROGRESS_TEXT)))


def _release(found: session.Session, group: str) -> None:
    """Releases the session even if the task's cancel arrives during the release. A cancel is raised only once."""
    try:
        found.release(group)
    except TaskCanceled:
        found.release(group)
        raise


def _stopped(batch: list[Running]) -> list[Answer]:
    return [protocol.Stopped(running.slot) for running in batch]


def _attempt(spark: SparkSession, batch: list[Running], link: Driver) -> dict[int, Outcome]:
    # Loads PySpark, so only with the first task.
    from interlock.spark.attempt import run_attempt, run_together  # noqa: PLC0415
    from interlock.spark.context import TaskContext  # noqa: PLC0415

    work, task = batch[0].work, batch[0].task
    data = TaskData(task_id=task.task_id, inputs=[], outputs=[]) if work.data is None else _data.decode(work.data)
    context = TaskContext(work, task, link, spark, data)
    if work.operator == SPARK_MAP:
        results = run_together(spark, context, [running.task for running in batch])
        return {slot: (result, [], []) for slot, result in results.items()}
    return {task.slot: run_attempt(spark, context, data, context.payload)}


def _show_no_cancel(arguments: threading.ExceptHookArgs) -> None:
    """Ignores a cancel that reaches a thread after its answer; any other exception is printed as usual."""
    if not issubclass(arguments.exc_type, TaskCanceled):
        threading.__excepthook__(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="interlock.spark.driver")
    for name in ("--work", "--reports", "--parent", "--result-limit"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--operators", action="append", default=[])
    parser.add_argument("--hidden", action="append", default=[], type=Path)
    parser.add_argument("--kept", action="append", default=[], type=Path)
    parser.add_argument("--reload", action="store_true")
    parser.add_argument("modules", nargs="*")
    return parser.parse_args()


def main() -> NoReturn:
    asked = _arguments()
    linux.die_with(asked.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait_for_the_wrapper)
    for descriptor in (asked.work, asked.reports):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=2)
    threading.excepthook = _show_no_cancel
    driver = Driver(asked.work, asked.reports, asked.result_limit, asked.scratch)
    sys.stdout, sys.stderr = ThreadLines(driver, "stdout"), ThreadLines(driver, "stderr")
    keep_logging()
    confinement.confine(asked.hidden, asked.kept)
    given = catalogue.sources(asked.operators)
    catalogue.extend_search_path(given)
    operators.give(given)
    driver.code = LoadedCode(given) if asked.reload else None
    for module in asked.modules:
        importlib.import_module(module)
    driver.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
