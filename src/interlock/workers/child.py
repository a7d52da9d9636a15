"""The process that runs operator code: `python -m interlock.workers.child`. Only the wrapper starts it.

It holds no token and no address. It runs its assignments in order and writes each report immediately, so that a crash
loses only the running task. It ends when the wrapper does.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

import msgspec

from interlock.processes import linux
from interlock.wire.attempts import Event
from interlock.workers import catalogue, confinement, operators, protocol
from interlock.workers.child_runtime import Lines, encoded, keep_logging, raised, wait_for_the_wrapper
from interlock.workers.context import TaskCanceled, TaskContext, TaskFailed
from interlock.workers.edits import LoadedCode
from interlock.workers.process import EXIT_OUT_OF_MEMORY

READ = 1 << 18

_decode = msgspec.json.Decoder().decode


class Child:
    """Reads assignments, runs them and reports their outcomes.

    SIGUSR1 signals that the control pipe has data. Its handler may interrupt an operator anywhere, but never while a
    frame is read or written: these sections are shielded, and a signal that arrives in one is handled right after it.
    """

    def __init__(self, work: int, control: int, reports: int, result_limit: int) -> None:
        self._work, self._control, self._reports = work, control, reports
        self._result_limit = result_limit
        self.code: LoadedCode | None = None
        """Set if tasks must not run with code that was edited since."""
        self._outdated = False
        self._frames = protocol.for_child()
        self._waiting: deque[tuple[protocol.Work, protocol.Assignment]] = deque()
        self._answers: dict[int, protocol.EmitAnswered] = {}
        self._canceled: set[int] = set()
        self._paused: set[int] = set()
        self._running: int | None = None
        """The slot whose operator may be interrupted, while one runs."""
        self.slot = 0
        """The slot to which printed lines belong."""
        self._main = threading.get_ident()
        self._writing = threading.Lock()
        self._shielded = False
        self._signaled = False

    def serve(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_signal)
        self.report(protocol.Ready())
        while True:
            try:
                work, task = self._waiting.popleft()
            except IndexError:
                self._read()
            else:
                self._execute(work, task)

    # Running a task

    def _execute(self, work: protocol.Work, task: protocol.Assignment) -> None:
        if self._is_outdated():
            slots = [task.slot, *(waiting.slot for _, waiting in self._waiting)]
            self._waiting.clear()
            self.report(protocol.Outdated(slots))
            return
        self.slot = task.slot
        self._answers.clear()
        outcome: protocol.ToWrapper
        try:
            outcome = protocol.Stopped(task.slot) if task.slot in self._canceled else self._attempt(work, task)
        except TaskCanceled:
            outcome = protocol.Stopped(task.slot)
        self._running = None
        self._canceled.discard(task.slot)
        self._paused.discard(task.slot)
        sys.stdout.flush()
        sys.stderr.flush()
        self.report(outcome)

    def _is_outdated(self) -> bool:
        if self.code is not None and not self._outdated:
            self._outdated = self.code.edited()
        return self._outdated

    def _attempt(self, work: protocol.Work, task: protocol.Assignment) -> protocol.ToWrapper:
        start = time.perf_counter()
        try:
            context = TaskContext(work, task, self)
            function = operators.resolve(work.operator)
            payload = _decode(task.payload)
            self._running = task.slot
            value = function(payload, context)
            self._running = None
            result = encoded(value, self._result_limit)
        except TaskCanceled:
            raise
        except BaseException as error:
            self._running = None
            return raised(self, task.slot, time.perf_counter() - start, error)
        return protocol.Finished(task.slot, time.perf_counter() - start, result, *context.committed)

    # Calls from operators (see context.Link)

    def progress(self, slot: int, fraction: float, text: str | None) -> None:
        self.report(protocol.Progressed(slot, fraction, text))

    def emit(self, slot: int, events: list[Event]) -> int:
        if threading.get_ident() != self._main:
            raise RuntimeError("call ctx.emit from the thread that runs the operator, not from another one")
        self.report(protocol.Emit(slot, events))
        while (answer := self._answers.pop(slot, None)) is None:
            select.select([self._work], [], [])
            self._read()
        if answer.problem is not None:
            raise TaskFailed(answer.problem, "EmitRefused")
        return answer.accepted

    def canceled(self, slot: int) -> bool:
        return slot in self._canceled

    def paused(self, slot: int) -> bool:
        return slot in self._paused

    # Pipes

    def report(self, message: protocol.ToWrapper) -> None:
        data = protocol.frame(message)
        if threading.get_ident() != self._main:
            self._write(data)
            return
        self._shielded = True
        self._write(data)
        self._unshield()

    def _write(self, data: bytes) -> None:
        with self._writing:
            try:
                written = os.write(self._reports, data)
                while written < len(data):
                    data = data[written:]
                    written = os.write(self._reports, data)
            except OSError:
                os._exit(linux.ORPHANED)

    def _read(self) -> None:
        self._shielded = True
        self._take_in()
        self._unshield()

    def _take_in(self) -> None:
        data = os.read(self._work, READ)
        if not data:
            os._exit(0)
        for message in self._frames.feed(data):
            if isinstance(message, protocol.Assign):
                self._waiting.extend((message.work, task) for task in message.tasks)
            else:
                self._answers[message.slot] = message

    # Cancel and recall

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signaled = True
        if not self._shielded:
            self._unshield()

    def _unshield(self) -> None:
        """Leaves a shielded section and handles pending signals. May raise TaskCanceled in the operator."""
        self._shielded = False
        while self._signaled:
            self._shielded = True
            self._signaled = False
            self._obey()
            self._shielded = False
        if self._running is not None and self._running in self._canceled:
            self._running = None
            raise TaskCanceled

    def _obey(self) -> None:
        while select.select([self._control], [], [], 0)[0]:
            record = os.read(self._control, protocol.CONTROL.size)
            if not record:
                return
            kind, slot = protocol.CONTROL.unpack(record)
            match kind:
                case protocol.CANCEL:
                    self._canceled.add(slot)
                case protocol.PAUSE:
                    self._paused.add(slot)
                case protocol.RESUME:
                    self._paused.discard(slot)
                case protocol.RECALL:
                    self._give_back()

    def _give_back(self) -> None:
        while select.select([self._work], [], [], 0)[0]:
            self._take_in()
        slots = [task.slot for _, task in self._waiting]
        self._waiting.clear()
        self._write(protocol.frame(protocol.GivenBack(slots)))


def _limit_memory(megabytes: int) -> None:
    if megabytes:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="interlock.workers.child")
    for name in ("--work", "--control", "--reports", "--parent", "--memory-mb", "--result-limit"):
        parser.add_argument(name, type=int, required=True)
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
    for descriptor in (asked.work, asked.control, asked.reports):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=2)
    child = Child(asked.work, asked.control, asked.reports, asked.result_limit)
    sys.stdout, sys.stderr = Lines(child, "stdout"), Lines(child, "stderr")
    keep_logging()
    _limit_memory(asked.memory_mb)
    confinement.confine(asked.hidden, asked.kept)
    given = catalogue.sources(asked.operators)
    catalogue.extend_search_path(given)
    operators.give(given)
    child.code = LoadedCode(given) if asked.reload else None
    for module in asked.modules:
        importlib.import_module(module)
    gc.freeze()
    try:
        child.serve()
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    os._exit(0)


if __name__ == "__main__":
    main()
