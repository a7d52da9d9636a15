"""What an attempt asks for, and gets, to reach objects by itself."""

from __future__ import annotations

from datetime import datetime
from typing import Literal
from uuid import UUID

from interlock.wire.base import Attempt, Internal


class CredentialsRequest(Internal, frozen=True, kw_only=True):
    """By the holder of the task. The capability token names task and attempt, so the body may be left out; a fence
    that is there must be the attempt's."""

    task_id: UUID | None = None
    attempt: Attempt | None = None
    lease_token: UUID | None = None


class TaskCredentials(Internal, frozen=True, kw_only=True):
    """For S3 those of a session of its own, for a directory a token for the gateway. Whatever they are, they end with
    the lease as it was when they were made."""

    scheme: Literal["s3", "file"]
    expiration: datetime
    read_prefixes: list[str]
    write_prefixes: list[str]
    endpoint: str | None = None
    """Of a store beside AWS, or of the gateway."""
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    object_token: str | None = None
