"""Tasks that run in threads of one process: how they are told apart, interrupted, and given a share of the cores."""

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
from interlock.workers.context import TaskCanceled
from interlock.workers.inside import Desk, Lines

WAIT_STEP_SECONDS: Final = 0.2
"""A thread can be interrupted between two steps of a wait, and not within one."""


@dataclass(eq=False)
class Running:
    """One task, from its assignment until it is answered."""

    work: protocol.Work
    task: protocol.Assignment
    pool: str
    since: float = field(default_factory=time.monotonic)
    canceled: bool = False
    paused: bool = False
    answered: bool = False
    said: str | None = None
    """What the operator said last about how far it is."""
    shown: str | None = None
    """What Spark was last shown to be doing."""
    answers: SimpleQueue[protocol.EmitAnswered] = field(default_factory=SimpleQueue)
    thread: int | None = None
    """The thread that may be interrupted now."""
    company: list[Running] = field(default_factory=list, repr=False)
    """Tasks that run at once in one thread, this one included. The first of them has it."""

    @property
    def slot(self) -> int:
        return self.task.slot

    @property
    def group(self) -> str:
        """The name of all that it does in Spark."""
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
        """Raise TaskCanceled in the operator, as soon as it is back in Python code."""
        if self.thread is not None:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(self.thread), ctypes.py_object(TaskCanceled))


class Pools:
    """Gives each job that has tasks running one of a fixed number of Spark's pools.

    Jobs share the cores evenly, whatever number of tasks each has running.
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

    def __init__(self, desk: Desk, stream: str) -> None:
        self._desk, self._stream = desk, stream
        self._of_thread = threading.local()

    @property
    def _lines(self) -> Lines:
        found: Lines | None = getattr(self._of_thread, "lines", None)
        if found is None:
            found = self._of_thread.lines = Lines(self._desk, self._stream)
        return found

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return self._lines.write(text)

    def flush(self) -> None:
        self._lines.flush()
