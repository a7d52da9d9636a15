"""Sessions of people in the dashboard: a cookie in place of an API key, and one-time links that start a session.

A session has the rights of its API key or member, read with each request. Its secret is rotated while the page is in
use; a secret that was rotated away is valid for a moment, and later use of it revokes the session, because only a copy
of the cookie can present it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from http.cookies import CookieError, SimpleCookie
from typing import Final
from uuid import UUID

from interlock.access.principals import ROLE_SCOPES, Members, Principal, member_id
from interlock.access.sign_in import IdentityProviderSignIn
from interlock.errors import Forbidden, NotFound, Unauthenticated
from interlock.http.cursors import next_cursor
from interlock.http.requests import Headers
from interlock.settings import Settings, host_of, is_loopback
from interlock.stores.postgres import Database, Row, queries
from interlock.wire.access import Role
from interlock.wire.sessions import SessionEntry, SessionPage

_sql = queries(__name__, "sessions")

CSRF_HEADER: Final = "x-interlock-csrf"
SECURE_COOKIE: Final = "__Host-interlock"
PLAIN_COOKIE: Final = "interlock_session"
"""Over plain HTTP on this machine, where browsers accept no `__Host-` cookie."""
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ROTATE_SECONDS: Final = 600.0
GRACE_SECONDS: Final = 60.0
"""Time for which a rotated secret is still valid: requests with it may be under way."""
_BATCH: Final = 1_000
_COOKIE: Final = re.compile(r"ils_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_LINK: Final = re.compile(r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True)
class Session:
    """An authenticated session. `cookie` is set when it is new."""

    session_id: str
    principal: Principal
    csrf: str
    created_at: datetime
    expires_at: datetime
    issuer: str | None = None
    subject: str | None = None
    due: bool = False
    cookie: str | None = None

    @property
    def of_key(self) -> str | None:
        return self.principal.key_id if self.subject is None else None


class Sessions:
    """`provider` is the sign-in with the identity provider, if Interlock is registered there."""

    def __init__(
        self, database: Database, settings: Settings, members: Members, provider: IdentityProviderSignIn | None
    ) -> None:
        self.provider = provider
        self._database = database
        self._members = members
        self._life_seconds = settings.session_hours * 3600
        self._idle_seconds = settings.session_idle_hours * 3600
        self._link_seconds = settings.sign_in_link_seconds
        self.secure = settings.objects_base_url.startswith("https://") or not is_loopback(host_of(settings.gateway))
        self.cookie_name = SECURE_COOKIE if self.secure else PLAIN_COOKIE
        self.max_age = int(self._life_seconds)

    def now(self) -> datetime:
        return self._database.clock.now()

    def cookie_in(self, headers: Headers) -> str | None:
        """Returns the session's cookie of a request. Of several with the name, none can be trusted."""
        found: list[str] = []
        for line in headers("cookie"):
            try:
                parsed = SimpleCookie(line)
            except CookieError:
                return None
            found += [parsed[self.cookie_name].value] if self.cookie_name in parsed else []
            if line.count(f"{self.cookie_name}=") > 1:
                return None
        return found[0] if len(found) == 1 else None

    # Start

    async def start_of_key(self, principal: Principal) -> Session:
        return await self._start(principal, key_id=principal.key_id)

    async def start_of_member(self, issuer: str, subject: str, org: str | None) -> Session:
        """Starts a session in an org of the user: by default in the first."""
        rows = await self._members.roles(issuer, subject)
        chosen = [row for row in rows if org is None or row["org"] == org]
        if not chosen:
            raise Forbidden(
                "You are not a member of any org here; an admin can add you with `interlock users allow`."
                if org is None
                else f"You are not a member of the org {org!r}.",
                code="not_a_member",
            )
        return await self._start(_member(issuer, subject, chosen[0]), issuer=issuer, subject=subject)

    async def _start(
        self, principal: Principal, *, key_id: str | None = None, issuer: str | None = None, subject: str | None = None
    ) -> Session:
        session_id, secret, csrf = secrets.token_hex(8), secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        async with self._database.connection() as connection:
            row = await _sql.insert_session(
                connection,
                session_id=session_id,
                org_id=principal.org_id,
                key_id=key_id,
                issuer=issuer,
                subject=subject,
                csrf=csrf,
                secret_hash=_hash(secret),
                seconds=self._life_seconds,
            )
        return Session(
            session_id=session_id,
            principal=principal,
            csrf=csrf,
            created_at=row["created_at"],
            expires_at=row["expires_at"],
            issuer=issuer,
            subject=subject,
            cookie=f"ils_{session_id}_{secret}",
        )

    # Use

    async def authenticate(self, cookie: str | None) -> Session:
        if cookie is None:
            raise Unauthenticated("You are not signed in.", code="session_missing")
        match = _COOKIE.fullmatch(cookie)
        row = await self._find(match[1]) if match else None
        if match is None or row is None or not row["live"] or row["issuer"] not in (None, self._members.issuer_name):
            raise _expired()
        digest = _hash(match[2])
        if hmac.compare_digest(digest, row["secret_hash"]):
            return _session(row)
        if not hmac.compare_digest(digest, row["previous_hash"] or b""):
            raise _expired()
        if not row["within_grace"]:
            await self._revoke(row["session_id"], row["org_id"])
            raise _expired()
        return _session(row, renewable=False)

    async def _find(self, session_id: str) -> Row | None:
        async with self._database.connection() as connection:
            row: Row | None = await _sql.find_session(
                connection,
                session_id=session_id,
                grace_seconds=GRACE_SECONDS,
                rotate_seconds=ROTATE_SECONDS,
                idle_seconds=self._idle_seconds,
            )
        return row

    async def renewed(self, session: Session, cookie: str) -> str | None:
        """Returns a new cookie if the secret is due for rotation and no other request has rotated it."""
        if not session.due:
            return None
        fresh = secrets.token_urlsafe(32)
        async with self._database.connection() as connection:
            rotated = await _sql.rotate_session(
                connection, session_id=session.session_id, known=_hash(cookie[-43:]), fresh=_hash(fresh)
            )
        return None if rotated is None else f"ils_{session.session_id}_{fresh}"

    async def live(self, session_ids: Sequence[str], org_id: UUID) -> set[str]:
        """Returns those of the sessions that are still valid."""
        async with self._database.connection() as connection:
            rows = await _sql.live_sessions(
                connection, session_ids=list(session_ids), org_id=org_id, idle_seconds=self._idle_seconds
            )
        return {row["session_id"] for row in rows}

    async def orgs_of(self, session: Session) -> list[tuple[str, Role]]:
        if session.issuer is None or session.subject is None:
            return [(session.principal.org, session.principal.role)]
        rows = await self._members.roles(session.issuer, session.subject)
        return [(row["org"], Role(row["role"])) for row in rows]

    async def switch(self, session: Session, org: str) -> Session:
        """Replaces a member's session by one in another of their orgs."""
        if session.issuer is None or session.subject is None:
            raise Forbidden(
                f"This session belongs to an API key of the org {session.principal.org!r}; sign in with a key of "
                f"{org!r} instead.",
                code="not_a_member",
            )
        made = await self.start_of_member(session.issuer, session.subject, org)
        await self.end(session)
        return made

    # End

    async def end(self, session: Session) -> None:
        await self._revoke(session.session_id, session.principal.org_id)

    async def revoke(self, session_id: str, caller: Principal, *, current: str | None) -> SessionEntry:
        """Revokes a session of the caller, or for an admin one of the org."""
        row = await self._revoke(session_id, caller.org_id, **_mine(caller))
        if row is None:
            raise NotFound(f"There is no session {session_id!r} in this org.")
        return _entry(row, current)

    async def _revoke(
        self, session_id: str, org_id: UUID, *, key_id: str | None = None, subject: str | None = None
    ) -> Row | None:
        async with self._database.connection() as connection:
            row: Row | None = await _sql.revoke_session(
                connection, session_id=session_id, org_id=org_id, key_id=key_id, subject=subject
            )
        return row

    async def page(self, caller: Principal, current: str | None, cursor: str | None, limit: int) -> SessionPage:
        async with self._database.connection() as connection:
            rows = await _sql.sessions_of(
                connection,
                org_id=caller.org_id,
                after=cursor or "",
                idle_seconds=self._idle_seconds,
                limit=limit,
                **_mine(caller),
            )
        return SessionPage(
            sessions=[_entry(row, current) for row in rows], next_cursor=next_cursor(rows, limit, "session_id")
        )

    async def forget_expired(self) -> int:
        async with self._database.connection() as connection:
            done = len(await _sql.delete_expired_sessions(connection, limit=_BATCH))
            return done + len(await _sql.delete_expired_links(connection, limit=_BATCH))

    # Links

    async def link(self, key_id: str) -> tuple[str, datetime]:
        """Creates a link for an API key. Returns its token and when it expires."""
        token = secrets.token_urlsafe(32)
        async with self._database.connection() as connection:
            row = await _sql.insert_link(connection, token_hash=_hash(token), key_id=key_id, seconds=self._link_seconds)
        return token, row["expires_at"]

    async def start_of_link(self, token: str) -> Session:
        row: Row | None = None
        if _LINK.fullmatch(token):
            async with self._database.connection() as connection:
                row = await _sql.use_link(connection, token_hash=_hash(token))
        if row is None:
            raise Unauthenticated(
                "This link was used before, or it has expired; create another one with `interlock open`.",
                code="link_used",
            )
        return await self.start_of_key(_of_key(row))


def _expired() -> Unauthenticated:
    return Unauthenticated("Your session has ended; sign in again.", code="session_expired")


def _session(row: Row, *, renewable: bool = True) -> Session:
    is_member = row["subject"] is not None
    return Session(
        session_id=row["session_id"],
        principal=_member(row["issuer"], row["subject"], row) if is_member else _of_key(row),
        csrf=row["csrf"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        issuer=row["issuer"],
        subject=row["subject"],
        due=renewable and row["due"],
    )


def _of_key(row: Row) -> Principal:
    return Principal(
        key_id=row["key_id"],
        org_id=row["org_id"],
        org=row["org"],
        user=row["user_name"],
        role=Role(row["role"]),
        scopes=frozenset(row["scopes"]),
        service=row["service"],
    )


def _member(issuer: str, subject: str, row: Row) -> Principal:
    role = Role(row["role"])
    return Principal(
        key_id=member_id(issuer, subject),
        org_id=row["org_id"],
        org=row["org"],
        user=subject,
        role=role,
        scopes=ROLE_SCOPES[role],
    )


def _mine(caller: Principal) -> dict[str, str | None]:
    """Returns the filter of a caller: admins see the sessions of their org, others their own."""
    if "admin" in caller.scopes:
        return {"key_id": None, "subject": None}
    is_member = caller.key_id.startswith("oidc-")
    return {"key_id": None if is_member else caller.key_id, "subject": caller.user if is_member else None}


def _entry(row: Row, current: str | None) -> SessionEntry:
    return SessionEntry(
        session_id=row["session_id"],
        user=row["user_name"],
        org=row["org"],
        kind="oidc" if row["key_id"] is None else "key",
        created_at=row["created_at"],
        seen_at=row["rotated_at"],
        expires_at=row["expires_at"],
        current=row["session_id"] == current,
    )


def _hash(secret: str) -> bytes:
    # 256 random bits need no slow hash, because they cannot be guessed.
    return hashlib.sha256(secret.encode()).digest()
