"""Bundles of user code, and the bodies that the dispatcher and a runner exchange."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Raw, Struct

from interlock.wire.attempts import TaskInput, WriteGrant
from interlock.wire.base import Internal, Reply
from interlock.wire.tasks import JobRef


class BundleView(Reply, frozen=True, kw_only=True):
    sha256: str
    names: list[str]
    """Names whose newest upload is this bundle."""
    size_bytes: int
    files: int
    unpacked_bytes: int
    modules: dict[str, str]
    """Modules that an entrypoint may name before its last dot, with their language; and `bootstrap`."""
    uploaded_by: str
    uploaded_at: datetime


class BundlePage(Reply, frozen=True, kw_only=True):
    bundles: list[BundleView]
    next_cursor: str | None


class Endpoints(Struct, frozen=True, kw_only=True):
    """The addresses of the platform for untrusted code."""

    dispatcher_url: str
    query_url: str | None
    objects_url: str | None
    objects_in_bucket: bool = False
    """True if `objects_url` is an object store, False if it is the gateway."""


class InvocationLimits(Struct, frozen=True, kw_only=True):
    memory_mb: int
    cpu_seconds: int
    timeout_seconds: float
    processes: int
    disk_mb: int


class Invocation(Struct, frozen=True, kw_only=True):
    """One attempt, with everything that the runner needs to execute it."""

    task_id: UUID
    attempt: int
    lease_token: UUID
    lease_expires_at: datetime
    capability_token: str
    bundle_url: str
    """Signed URL of this one object, valid for the longest duration of the attempt."""
    bundle_sha256: str
    entrypoint: str
    language: Literal["python", "node", "bootstrap"]
    endpoints: Endpoints
    job: JobRef
    operator: str
    config: Raw
    inputs: list[TaskInput]
    outputs: list[WriteGrant]
    payload: Raw
    limits: InvocationLimits


class RunnerReport(Internal, frozen=True, kw_only=True):
    """How the process of an attempt ended. The attempt itself reports its outcome to the dispatcher."""

    outcome: Literal["exited", "signaled", "timeout", "oom", "refused", "bad_bundle"]
    exit_code: int | None = None
    signal: str | int | None = None
    cause: Annotated[str, Meta(max_length=1_000)] | None = None
    """A short code: `fork_limit`, `disk_full`."""
    detail: Annotated[str, Meta(max_length=10_000)] | None = None
    stderr_tail: Annotated[str, Meta(max_length=65_536)] | None = None
