"""Sessions of people in the dashboard, and the ways to start one."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta

from interlock.wire.access import Role
from interlock.wire.base import Reply, Request

Credential = Annotated[str, Meta(min_length=1, max_length=500)]


class SignInMethods(Reply, frozen=True, kw_only=True):
    """Ways to sign in to this installation."""

    key: bool
    oidc: bool
    oidc_url: str | None
    """Navigate to this path to sign in with the identity provider."""


class KeySignIn(Request, frozen=True, kw_only=True):
    key: Credential
    """An API key, `ilk_…`. The session has its rights, and ends when it is revoked."""


class LinkSignIn(Request, frozen=True, kw_only=True):
    token: Credential
    """The part after `#sign-in=` of a link that `interlock open` or `interlock up` printed."""


class OrgChoice(Request, frozen=True, kw_only=True):
    org: Annotated[str, Meta(min_length=1, max_length=200)]


class OrgRole(Reply, frozen=True, kw_only=True):
    org: str
    role: Role


class SessionView(Reply, frozen=True, kw_only=True):
    """The session of the caller."""

    session_id: str
    user: str
    org: str
    role: Role
    scopes: list[str]
    kind: Literal["key", "oidc"]
    csrf: str
    """Send it as `X-Interlock-CSRF` with every request that changes something."""
    orgs: list[OrgRole]
    """The orgs of the user: one for an API key."""
    created_at: datetime
    expires_at: datetime
    server_time: datetime
    version: str


class SessionEntry(Reply, frozen=True, kw_only=True):
    """A session in a list."""

    session_id: str
    user: str
    org: str
    kind: Literal["key", "oidc"]
    created_at: datetime
    seen_at: datetime
    """When its cookie was last renewed."""
    expires_at: datetime
    current: bool


class SessionPage(Reply, frozen=True, kw_only=True):
    sessions: list[SessionEntry]
    next_cursor: str | None


class SignInLink(Reply, frozen=True, kw_only=True):
    """A link that signs its first visitor in with the API key that created it."""

    url: str
    token: str
    expires_at: datetime
