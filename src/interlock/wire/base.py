"""What the bodies of all areas share: scalars with their limits, states, and how strict each side is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$(?!\n)")]
ServiceName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$(?!\n)")]
"""Of services and of commands: one spelling, and no look-alikes."""
OperatorName = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?$(?!\n)")
]
OperatorPattern = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^([A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z0-9_.]*)?)?\*?$(?!\n)")
]
"""A name of an operator, or the beginning of one with `*` behind it."""
WorkerId = Annotated[str, Meta(min_length=1, max_length=200)]
JsonPointer = Annotated[str, Meta(pattern=r"^(/[^/]*)+$(?!\n)", max_length=500)]
LONGEST_SECONDS: Final = 7 * 86_400
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)]
Attempt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**62)]
Position = Annotated[int, Meta(ge=-(2**62), le=2**62)]
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
    """How an attempt ended. `Released` gives the attempt back: it does not count against the policy."""

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
    """What a user sends."""


class Internal(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What workers and the dispatcher say to each other."""


class Reply(Struct, kw_only=True, frozen=True):
    """What a user gets."""
