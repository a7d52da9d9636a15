"""Keys, tokens, orgs, workers, health."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from interlock.wire.base import Name, OperatorPattern, Reply, Request, ServiceName


class Role(StrEnum):
    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"


class KeyRequest(Request, frozen=True, kw_only=True):
    user: Name
    role: Role = Role.READER
    scopes: list[str] | None = None
    """Narrows what the role allows; unset keeps all of it."""
    expires_in_days: Annotated[float, Meta(gt=0, le=3650)] | None = None
    org: Name | None = None
    """Another org than the caller's: needs the `platform` scope."""
    service: ServiceName | None = None
    """The key speaks for this service: it may send commands as it and receive what is sent to it, and, unless `scopes`
    says so, nothing else."""


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
    """Which service of the org it speaks for."""


class KeyCreated(Reply, frozen=True, kw_only=True):
    key: str
    """The only time it is shown: what is stored is its hash."""
    view: KeyView


class KeyList(Reply, frozen=True, kw_only=True):
    keys: list[KeyView]


class MemberRequest(Request, frozen=True, kw_only=True):
    subject: Annotated[str, Meta(min_length=1, max_length=255)]
    """`sub` of the user's tokens, as the identity provider writes it."""
    role: Role = Role.READER
    org: Name | None = None
    """Another org than the caller's: needs the `platform` scope."""


class MemberView(Reply, frozen=True, kw_only=True):
    subject: str
    org: str
    role: Role
    since: datetime
    by: str
    """Who let the user in, or changed the role last."""


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
    """The operators that an org may use."""

    operators: Annotated[list[OperatorPattern], Meta(max_length=1000)] | None
    """Names, or beginnings of names with `*` behind them; null for any."""


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
