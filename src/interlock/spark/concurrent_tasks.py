"""Tasks that run in threads of one process: their state, their interruption, and their share of the cores."""

from __future__ import annotations

import ctypes
import io
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final

from interlock.workers import protocol
from interlock.workers.child_runtime import Lines, LineSink
from interlock.workers.context import TaskCanceled

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
