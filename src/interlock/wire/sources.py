"""Sources of DAGs: what starts them, and how they fare."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import UNSET, Meta, Raw, UnsetType

from interlock.wire.base import Name, Position, Reply, Request


class SourceState(StrEnum):
    """Of an always_on source what its task does; others are `ready` unless they are held back."""

    STARTING = "starting"
    QUEUED = "queued"
    RUNNING = "running"
    RESTARTING = "restarting"
    PAUSED = "paused"
    READY = "ready"


class SourceOutput(Reply, frozen=True, kw_only=True):
    output: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    cursor: int | None
    """How far a stream is complete."""
    last_scope: str | None
    """Of its newest event: a cursor, or a partition."""
    last_at: datetime | None


class SourceView(Reply, frozen=True, kw_only=True):
    job: str
    job_id: UUID
    current: bool
    """False for one that is being built beside the current one."""
    kind: str
    state: SourceState
    since: datetime | None
    paused: str | None
    """Why it is held back."""
    task_id: UUID | None
    """Of always_on alone: the same through all restarts."""
    attempt: int | None
    restarts: int
    """In a row, each soon after the last."""
    worker_id: str | None
    last_error: str | None
    last_error_at: datetime | None
    next_at: datetime | None
    """When a schedule starts it next."""
    waiting: int
    """Triggers that are not tasks yet, counted up to 1,000."""
    hook: str | None
    """Path of a webhook, once it has a secret."""
    outputs: list[SourceOutput]


class SourceList(Reply, frozen=True, kw_only=True):
    sources: list[SourceView]


class SourceEvent(Request, frozen=True, kw_only=True):
    """A scope of an output that has changed, or a payload for a task."""

    output: Name | None = None
    """May be left out by a job with one output."""
    cursor: Position | None = None
    start: Position | None = None
    end: Position | None = None
    payload: Raw | UnsetType = UNSET


class SourceEvents(Request, frozen=True, kw_only=True):
    events: Annotated[list[SourceEvent], Meta(min_length=1, max_length=1_000)]


class SourceEventsAccepted(Reply, frozen=True, kw_only=True):
    events: int
    """Scopes that are written."""
    triggers: int
    """Payloads that become tasks."""


class SecretRequest(Request, frozen=True, kw_only=True):
    rotate: bool = False
    """Replace the secret that is there; it is good for another hour."""


class HookSecret(Reply, frozen=True, kw_only=True):
    hook_id: str
    path: str
    auth: str
    """`hmac` or `token`: how a call proves itself."""
    secret: str
    """The only time it is shown."""
    previous_until: datetime | None
    """How long the secret before this one is good."""


class HookAccepted(Reply, frozen=True, kw_only=True):
    accepted: bool = True
    duplicate: bool = False
    """The same call was accepted before, and is not carried out again."""
