"""Principals, credentials, secrets, objects, health."""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal
from uuid import UUID

from msgspec import Meta, Struct, field

from interlock.wire.base import Attempt, Internal, Name, OperatorPattern, Reply, Request, ServiceName


class ObjectView(Reply, frozen=True, kw_only=True):
    key: str
    size: int
    etag: str
    """Changes with the content; opaque otherwise."""
    modified_at: datetime


class ObjectPage(Reply, frozen=True, kw_only=True):
    objects: list[ObjectView]
    next_cursor: str | None


class UploadStarted(Reply, frozen=True, kw_only=True):
    key: str
    upload_id: str


class UploadPart(Request, frozen=True, kw_only=True):
    part_number: Annotated[int, Meta(ge=1, le=10_000)]
    etag: Annotated[str, Meta(max_length=200)]
    """The ETag that the PUT of the part returned."""


class UploadParts(Request, frozen=True, kw_only=True):
    parts: Annotated[list[UploadPart], Meta(min_length=1, max_length=10_000)]
    """All parts of the object, ordered by number."""


class CredentialsRequest(Internal, frozen=True, kw_only=True):
    """Sent by the holder of the task. The capability token identifies task and attempt, so the body is optional; if it
    contains a fence, it must be that of the attempt."""

    task_id: UUID | None = None
    attempt: Attempt | None = None
    lease_token: UUID | None = None


class TaskCredentials(Internal, frozen=True, kw_only=True):
    """Session credentials for S3, or a token for the gateway if objects are in a directory. They expire with the lease
    that was current when they were created."""

    scheme: Literal["s3", "file"]
    expiration: datetime
    read_prefixes: list[str]
    write_prefixes: list[str]
    endpoint: str | None = None
    """URL of the object store, or of the gateway."""
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    object_token: str | None = None


SHORTEST: Final = 8
"""Minimum length of a value. A shorter one would be redacted wherever it occurs by chance."""
LONGEST: Final = 8_192
NAMED: Final = r"^[A-Za-z_][A-Za-z0-9_-]{0,99}\Z"
"""Pattern of a secret's name."""

_reference = re.compile(r"\$\{secret:([^}]*)\}")


def secret_names(config: str) -> list[str]:
    """Returns the distinct names in `${secret:NAME}` references of a config. They may be invalid names."""
    return list(dict.fromkeys(_reference.findall(config)))


class OrgSecretRequest(Request, frozen=True, kw_only=True):
    """`PUT /v1/secrets/{name}`."""

    value: Annotated[str, Meta(min_length=SHORTEST, max_length=LONGEST)]
    hosts: Annotated[list[Annotated[str, Meta(min_length=1, max_length=260)]], Meta(max_length=20)] = field(
        default_factory=list
    )
    """Hosts that the value may be sent to, such as `rpc.example.com` or `rpc.example.com:8545`. Empty allows all."""

    def __repr__(self) -> str:
        return f"OrgSecretRequest(hosts={self.hosts!r})"


class OrgSecretView(Reply, frozen=True, kw_only=True):
    """Metadata of a secret. The value is never returned."""

    name: str
    hosts: list[str]
    version: int
    """1 for the first value; incremented with each new value."""
    set_by: str
    set_at: datetime


class OrgSecretPage(Reply, frozen=True, kw_only=True):
    secrets: list[OrgSecretView]
    next_cursor: str | None = None


class TaskSecret(Struct, array_like=True, frozen=True):
    """A secret that a claimed task's config refers to, for the worker that holds the task."""

    name: str
    value: str | None
    """Null if the secret does not exist or cannot be decrypted; `problem` says which."""
    hosts: list[str]
    problem: str | None = None
    missing: bool = False

    def __repr__(self) -> str:
        return f"TaskSecret({self.name!r})"


class Role(StrEnum):
    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"


class KeyRequest(Request, frozen=True, kw_only=True):
    user: Name
    role: Role = Role.READER
    scopes: list[str] | None = None
    """Restricts the scopes of the role; by default, all of them are granted."""
    expires_in_days: Annotated[float, Meta(gt=0, le=3650)] | None = None
    org: Name | None = None
    """An org other than the caller's. Requires the `platform` scope."""
    service: ServiceName | None = None
    """The service that the key acts for: it may send commands as the service and receive its commands. It may do
    nothing else unless `scopes` grants more.
    """


class KeyView(Reply, frozen=True, kw_only=True):
    key_id: str
    org: str
    user: str
    role: Role
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    service: str | None = None
    """The service of the org that the key acts for."""


class KeyCreated(Reply, frozen=True, kw_only=True):
    key: str
    """Shown only once: the server stores only its hash."""
    view: KeyView


class KeyList(Reply, frozen=True, kw_only=True):
    keys: list[KeyView]


class MemberRequest(Request, frozen=True, kw_only=True):
    subject: Annotated[str, Meta(min_length=1, max_length=255)]
    """The `sub` claim of the user's tokens, exactly as the identity provider writes it."""
    role: Role = Role.READER
    org: Name | None = None
    """An org other than the caller's. Requires the `platform` scope."""


class MemberView(Reply, frozen=True, kw_only=True):
    subject: str
    org: str
    role: Role
    since: datetime
    by: str
    """The user who granted access or last changed the role."""


class MemberPage(Reply, frozen=True, kw_only=True):
    members: list[MemberView]
    next_cursor: str | None


class WorkerTokenRequest(Request, frozen=True, kw_only=True):
    name: Name
    runtimes: list[Name] | None = None
    expires_in_days: Annotated[float, Meta(gt=0, le=3650)] | None = None


class WorkerTokenView(Reply, frozen=True, kw_only=True):
    token_id: str
    name: str
    runtimes: list[str] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class WorkerTokenCreated(Reply, frozen=True, kw_only=True):
    token: str
    view: WorkerTokenView


class WorkerTokenList(Reply, frozen=True, kw_only=True):
    tokens: list[WorkerTokenView]


class OrgRequest(Request, frozen=True, kw_only=True):
    name: Name


class OrgView(Reply, frozen=True, kw_only=True):
    org_id: UUID
    name: str


class OrgOperatorsRequest(Request, frozen=True, kw_only=True):
    operators: Annotated[list[OperatorPattern], Meta(max_length=1000)] | None
    """Names of operators, or prefixes of names followed by `*`; null allows all."""


class OrgOperators(Reply, frozen=True, kw_only=True):
    org: str
    operators: list[str] | None


class WorkerView(Reply, frozen=True, kw_only=True):
    worker_id: str
    queue: str
    last_seen_at: datetime


class WorkerList(Reply, frozen=True, kw_only=True):
    workers: list[WorkerView]


class Health(Reply, frozen=True, kw_only=True):
    status: Literal["ok", "degraded"]
    checks: dict[str, str]


class SigningKeyView(Reply, frozen=True, kw_only=True):
    kid: str
    created_at: datetime
    retired_at: datetime | None
    verify_until: datetime | None
