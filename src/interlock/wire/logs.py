"""Logs of attempts: the chunks that workers report, and the lines that users read.

A chunk is text. Each line has 13 digits of milliseconds since the epoch, a letter of LETTERS, and what was printed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from msgspec import Meta, Struct

from interlock.wire.base import Attempt, Internal, Reply

LETTERS: Final = {"o": "stdout", "e": "stderr", "t": "traceback", "r": "raw"}
"""Streams. `raw` is output that was not written through Python's streams."""
GAP: Final = "gap"
"""The stream of a line that the platform inserts where output was left out."""
CHUNK_BYTES: Final = 65_536
"""Largest chunk."""


class LogChunk(Internal, frozen=True, kw_only=True):
    task_id: UUID
    run_id: UUID | None = None
    attempt: Attempt
    lease_token: UUID
    start: Annotated[int, Meta(ge=0, lt=2**62)]
    """Bytes that the attempt had printed before. A gap to the previous chunk was left out."""
    text: Annotated[str, Meta(max_length=CHUNK_BYTES)]


class LogBatch(Internal, frozen=True, kw_only=True):
    items: Annotated[list[LogChunk], Meta(min_length=1, max_length=2_000)]


class LogsKept(Internal, frozen=True, kw_only=True):
    kept: int
    """Fewer than sent if chunks were repeated, or belong to no attempt."""


class LogLine(Struct, frozen=True):
    at: datetime
    stream: str
    text: str


class TaskLog(Reply, frozen=True, kw_only=True):
    """A part of the log of an attempt. To follow it, pass `next` as `after` until `ended` is true and `more` is not."""

    task_id: UUID
    attempt: int
    attempts: int
    """Number of the latest attempt."""
    ended: bool
    """True if the attempt prints nothing more."""
    lines: list[LogLine]
    next: int
    more: bool


class JobLogLine(Struct, frozen=True):
    task_id: UUID
    attempt: int
    at: datetime
    stream: str
    text: str


class JobLog(Reply, frozen=True, kw_only=True):
    """A part of what the tasks of a run, or of a job of a DAG, have printed, in the order in which it arrived."""

    job_id: UUID
    run_id: UUID | None
    lines: list[JobLogLine]
    next: int
    more: bool
