"""What an operator function is given beside its payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from uuid import UUID

import msgspec

from interlock.wire import Event, Output, TaskSecret, WriteGrant
from interlock.workers.protocol import Assignment, Outbound, Work

PROGRESS_TEXT = 500

_json = msgspec.json.Decoder()


class TaskCanceled(BaseException):
    """Raised inside an operator whose task was canceled: clean up and let it pass.

    Like `KeyboardInterrupt` it is no `Exception`, so that a catch-all in an operator does not swallow it.
    """


class TaskFailed(Exception):
    """Raise it to fail the task with an `error_class` of your own, which the job's policy may know."""

    def __init__(self, message: str, error_class: str | None = None) -> None:
        super().__init__(message)
        self.error_class = error_class or type(self).__name__


class Link(Protocol):
    """The way out of an operator: the child process offers it, the wrapper answers."""

    def progress(self, slot: int, fraction: float, text: str | None) -> None: ...

    def emit(self, slot: int, events: list[Event]) -> int: ...

    def canceled(self, slot: int) -> bool: ...

    def paused(self, slot: int) -> bool: ...


class TaskContext:
    """One attempt of one task, as its operator sees it."""

    def __init__(self, work: Work, assignment: Assignment, link: Link) -> None:
        self._work = work
        self._assignment = assignment
        self._link = link
        self._final_events: list[Event] = []
        self._final_outputs: list[Output] = []
        for one in work.secrets:
            if one.value is None:
                wrong = "SecretMissing" if one.missing else "SecretUnavailable"
                raise TaskFailed(one.problem or f"There is no secret {one.name!r}.", wrong)

    @property
    def task_id(self) -> UUID:
        return self._assignment.task_id

    @property
    def attempt(self) -> int:
        """1 for the first. A retry has the same `task_id`: make side effects idempotent by that."""
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
        """The task's place in its run."""
        return self._assignment.index

    @property
    def outputs(self) -> list[WriteGrant]:
        """Where this attempt may write, one entry per output of the job."""
        return self._work.outputs

    @property
    def data_url(self) -> str:
        """The data database, for operators of the platform itself: others are not given it."""
        if self._work.data_url is None:
            raise TaskFailed(
                f"Operator {self.operator!r} works on the data database, whose address this worker does not have: "
                "set INTERLOCK_DATA_URL for a worker of the platform runtime, and name the operator as it is built in.",
                "DataDatabaseRefused",
            )
        return self._work.data_url

    @property
    def outbound(self) -> Outbound:
        """Which servers an operator of the platform may ask: others are told of no exception and no proxy."""
        return self._work.outbound or Outbound()

    @property
    def secrets(self) -> list[TaskSecret]:
        """Those that the config names, for operators of the platform, which hold them to their hosts."""
        return self._work.secrets

    def secret(self, name: str) -> str:
        """The value of a secret of the task's org that the config names as `${secret:NAME}`.

        One that is bound to hosts is not given out: only operators of the platform can hold it to them.
        """
        found = next((one for one in self._work.secrets if one.name == name), None)
        if found is None or found.value is None:
            raise TaskFailed(
                f"The job's config does not name the secret {name!r}: write ${{secret:{name}}} into it.",
                "SecretMissing",
            )
        if found.hosts:
            raise TaskFailed(
                f"The secret {name!r} is bound to {', '.join(found.hosts)}, and only http_fetch and the operators of "
                "chains can hold it to that. Set it without --host if this operator may have it.",
                "SecretBound",
            )
        return found.value

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that the worker was started with `--pass-env ORG:NAME` for, of the task's org."""
        return self._work.environment

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = _json.decode(self._work.config)
        return config

    @cached_property
    def inputs(self) -> list[Any]:
        return [_json.decode(one) for one in self._work.inputs]

    @property
    def canceled(self) -> bool:
        """True once the task was canceled: for code that cannot be interrupted, such as a thread."""
        return self._link.canceled(self._assignment.slot)

    @property
    def paused(self) -> bool:
        """True while a source is to make nothing new, since those downstream are behind. Look again now and then."""
        return self._link.paused(self._assignment.slot)

    def progress(self, fraction: float, text: str | None = None) -> None:
        """Tell how far the attempt is, from 0 to 1. Cheap: the newest word goes out with the next heartbeat."""
        shown = min(max(float(fraction), 0.0), 1.0)
        self._link.progress(self._assignment.slot, shown, None if text is None else plain(text, PROGRESS_TEXT))

    def emit(self, events: Sequence[Event]) -> int:
        """Announce changes of datasets now, before the task ends; returns how many were accepted.

        Accepted means durable: they stay even if the attempt fails later.
        """
        return self._link.emit(self._assignment.slot, _checked(events, list[Event])) if events else 0

    def commit(self, outputs: Sequence[Output] = (), events: Sequence[Event] = ()) -> None:
        """Add outputs and events that become visible together with the task's completion, or not at all."""
        self._final_outputs += _checked(outputs, list[Output])
        self._final_events += _checked(events, list[Event])

    @property
    def committed(self) -> tuple[list[Event], list[Output]]:
        """What `commit` collected."""
        return self._final_events, self._final_outputs


def _checked(items: Sequence[Any], kind: type[list[Any]]) -> list[Any]:
    """Limits are checked where a value is read, not where it is made: better here than at the dispatcher."""
    try:
        checked: list[Any] = msgspec.convert(msgspec.to_builtins(list(items)), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"an event or output is not as the wire allows: {error}") from None
    return checked


def plain(text: str, limit: int) -> str:
    """Text any store takes: no NUL, no half of a surrogate pair, not too long."""
    clean = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
