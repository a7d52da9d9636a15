"""Shared parts of all bodies: scalars with limits, states, error replies, strictness of each side."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct


class DagProblem(Struct, frozen=True):
    """An error in a DAG file: its position, a message, and a suggestion. Lines and columns count from 1."""

    line: int
    column: int
    message: str
    suggestion: str


class Problem(Struct, frozen=True, omit_defaults=True):
    """An RFC 9457 problem. `code` is stable for programs; `detail` is for humans."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str = ""
    stale: str | None = None
    retry_after_ms: int | None = None
    errors: list[str] | None = None
    problems: list[DagProblem] | None = None
    candidates: list[str] | None = None
    """Full ids that an ambiguous prefix may mean."""


Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$(?!\n)")]
ServiceName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$(?!\n)")]
"""Name of a service or a command. One spelling only, without look-alike characters."""
OperatorName = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?$(?!\n)")
]
OperatorPattern = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^([A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z0-9_.]*)?)?\*?$(?!\n)")
]
"""The name of an operator, or a prefix of names followed by `*`."""
WorkerId = Annotated[str, Meta(min_length=1, max_length=200)]
JsonPointer = Annotated[str, Meta(pattern=r"^(/[^/]*)+$(?!\n)", max_length=500)]
LONGEST_SECONDS: Final = 7 * 86_400
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)]
Attempt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**62)]
Position = Annotated[int, Meta(ge=-(2**62), le=2**62)]
DateText = Annotated[str, Meta(min_length=1, max_length=60)]
"""A month, day or hour, such as 2026-11, 2026-11-18 or 2026-11-18T06."""
Bound = Position | DateText
"""A bound of a range: a position, or a date of a dataset with time partitions."""
Text = Annotated[str, Meta(max_length=10_000)]


class TaskStatus(StrEnum):
    QUEUED = "Queued"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


class RunState(StrEnum):
    INGESTING = "Ingesting"
    RUNNING = "Running"
    PAUSED = "Paused"
    COMPLETED = "Completed"
    COMPLETED_WITH_FAILURES = "CompletedWithFailures"
    FAILED = "Failed"
    CANCELED = "Canceled"


class Outcome(StrEnum):
    """Outcome of an attempt. A `Released` attempt does not count against the policy."""

    COMPLETED = "Completed"
    FAILED = "Failed"
    LEASE_EXPIRED = "LeaseExpired"
    TIMED_OUT = "TimedOut"
    CANCELED = "Canceled"
    RELEASED = "Released"


class Priority(StrEnum):
    NORMAL = "normal"
    BULK = "bulk"


class Request(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of bodies that users send."""


class Internal(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Base of bodies between workers and the dispatcher."""


class Reply(Struct, kw_only=True, frozen=True):
    """Base of bodies that users receive."""


MAX_PAGE = 1000
"""Items of a page, at most."""
