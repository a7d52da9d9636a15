"""The context object that an operator function receives next to its payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from uuid import UUID

import msgspec

from interlock.calendars import Interval, calendar_of
from interlock.wire.access import TaskSecret
from interlock.wire.attempts import Event, Output, WriteGrant
from interlock.workers.protocol import Assignment, Outbound, Work

PROGRESS_TEXT = 500

_json = msgspec.json.Decoder()


class TaskCanceled(BaseException):
    """Raised inside an operator whose task was canceled. Clean up, then let it propagate.

    Like `KeyboardInterrupt` it is not an `Exception`, so that a catch-all in an operator does not swallow it.
    """


class TaskFailed(Exception):
    """Raise it to fail the task with your own `error_class`, to which the job's policy can refer."""

    def __init__(self, message: str, error_class: str | None = None) -> None:
        super().__init__(message)
        self.error_class = error_class or type(self).__name__


class Link(Protocol):
    """Calls from an operator to the process that runs it, which the wrapper answers."""

    def progress(self, slot: int, fraction: float, text: str | None) -> None: ...

    def emit(self, slot: int, events: list[Event]) -> int: ...

    def canceled(self, slot: int) -> bool: ...

    def paused(self, slot: int) -> bool: ...


class TaskContext:
    """One attempt of one task, for its operator."""

    def __init__(self, work: Work, assignment: Assignment, link: Link) -> None:
        self._work = work
        self._assignment = assignment
        self._link = link
        self._final_events: list[Event] = []
        self._final_outputs: list[Output] = []
        for one in work.secrets:
            if one.value is None:
                wrong = "SecretMissing" if one.missing else "SecretUnavailable"
                raise TaskFailed(one.problem or f"The org has no secret {one.name!r}: have an admin set it.", wrong)

    @property
    def task_id(self) -> UUID:
        return self._assignment.task_id

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 1. A retry has the same `task_id`: use that to make side effects idempotent."""
        return self._work.attempt

    @property
    def operator(self) -> str:
        return self._work.operator

    @property
    def dag(self) -> str | None:
        return self._work.job[0]

    @property
    def job(self) -> str | None:
        return self._work.job[1]

    @property
    def run_id(self) -> UUID | None:
        return self._work.run_id

    @property
    def index(self) -> int | None:
        """The task's index in its run."""
        return self._assignment.index

    @property
    def outputs(self) -> list[WriteGrant]:
        """Locations that this attempt may write to, one entry per output of the job."""
        return self._work.outputs

    @property
    def data_url(self) -> str:
        """URL of the data database. Only the platform's own operators get it."""
        if self._work.data_url is None:
            raise TaskFailed(
                f"Operator {self.operator!r} needs the URL of the data database, which this worker does not have: set "
                "INTERLOCK_DATA_URL for a worker of the platform runtime, and use the built-in name of the operator.",
                "DataDatabaseRefused",
            )
        return self._work.data_url

    @property
    def outbound(self) -> Outbound:
        """Servers that the platform's own operators may connect to. Other operators get no exceptions and no proxy."""
        return self._work.outbound or Outbound()

    @property
    def secrets(self) -> list[TaskSecret]:
        """Secrets that the config refers to, for the platform's own operators, which send them only to their hosts."""
        return self._work.secrets

    def secret(self, name: str) -> str:
        """Returns the value of a secret of the task's org that the config refers to as `${secret:NAME}`.

        A secret that is bound to hosts is refused: only the platform's own operators can enforce the binding.
        """
        found = next((one for one in self._work.secrets if one.name == name), None)
        if found is None or found.value is None:
            raise TaskFailed(
                f"The job's config does not refer to the secret {name!r}: write ${{secret:{name}}} into the config.",
                "SecretMissing",
            )
        if found.hosts:
            raise TaskFailed(
                f"The secret {name!r} is bound to {', '.join(found.hosts)}, and only http_fetch and the operators for "
                "chains can enforce that. Set it without --host if this operator may have it.",
                "SecretBound",
            )
        return found.value

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the worker passes to tasks of this org, by `--pass-env ORG:NAME`."""
        return self._work.environment

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = _json.decode(self._work.config)
        return config

    @cached_property
    def inputs(self) -> list[Any]:
        return [_json.decode(one) for one in self._work.inputs]

    @cached_property
    def interval(self) -> Interval:
        """The time that this task stands for, if its job has time partitions: from `start` to before `end`."""
        if self._work.partition is None:
            raise TaskFailed(
                f"Job {self.job} has no time partitions: write `partition: daily` into the job, or use the range in "
                "the inputs or the payload.",
                "NoInterval",
            )
        span = self._span()
        if span is None:
            raise TaskFailed(
                "This task has no interval: neither its inputs nor its payload have a `start` and an `end`. Start the "
                "job by its schedule, or with: interlock backfill start DAG JOB DATE.",
                "NoInterval",
            )
        return calendar_of(self._work.partition).interval(*span)

    def _span(self) -> tuple[int, int] | None:
        """Returns the range of the task: that of its inputs, or `start` and `end` of its payload."""
        for given in (*self.inputs, _json.decode(self._assignment.payload)):
            if isinstance(given, dict) and type(given.get("start")) is int and type(given.get("end")) is int:
                return given["start"], given["end"]
        return None

    @property
    def canceled(self) -> bool:
        """True after the task was canceled. For code that cannot be interrupted, such as another thread."""
        return self._link.canceled(self._assignment.slot)

    @property
    def paused(self) -> bool:
        """True while a source must not produce new data, because jobs downstream are behind. Poll it regularly."""
        return self._link.paused(self._assignment.slot)

    def progress(self, fraction: float, text: str | None = None) -> None:
        """Reports the progress of the attempt, from 0 to 1. Cheap: only the latest value is sent, with a heartbeat."""
        shown = min(max(float(fraction), 0.0), 1.0)
        self._link.progress(self._assignment.slot, shown, None if text is None else plain(text, PROGRESS_TEXT))

    def emit(self, events: Sequence[Event]) -> int:
        """Emits dataset events now, before the task ends. Returns the number of accepted events.

        Accepted events are durable, even if the attempt fails later.
        """
        return self._link.emit(self._assignment.slot, _checked(events, list[Event])) if events else 0

    def commit(self, outputs: Sequence[Output] = (), events: Sequence[Event] = ()) -> None:
        """Adds outputs and events to the task's atomic commit: they become visible on its completion, or not at all."""
        self._final_outputs += _checked(outputs, list[Output])
        self._final_events += _checked(events, list[Event])

    @property
    def committed(self) -> tuple[list[Event], list[Output]]:
        """The events and outputs that `commit` collected."""
        return self._final_events, self._final_outputs


def _checked(items: Sequence[Any], kind: type[list[Any]]) -> list[Any]:
    """Checks the limits of the wire format here, not first at the dispatcher. msgspec checks only decoded values."""
    try:
        checked: list[Any] = msgspec.convert(msgspec.to_builtins(list(items)), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"an event or output is invalid: {error}") from None
    return checked


def plain(text: str, limit: int) -> str:
    """Returns text that every store accepts: no NUL, no lone surrogates, at most `limit` characters."""
    clean = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
