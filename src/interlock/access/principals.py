"""API keys of users, tokens of workers, and members of orgs that an identity provider signs in."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from interlock.access.oidc import Issuer
from interlock.clock import Clock
from interlock.errors import BadRequest, Conflict, Forbidden, NotFound, Unauthenticated
from interlock.http.cursors import next_cursor
from interlock.http.request_limits import Refused
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.access import (
    KeyCreated,
    KeyRequest,
    KeyView,
    MemberPage,
    MemberRequest,
    MemberView,
    OrgView,
    Role,
    WorkerTokenCreated,
    WorkerTokenRequest,
    WorkerTokenView,
)

_sql = queries(__name__, "principals")

READ: Final = frozenset({"jobs:read", "tasks:read", "queues:read", "query:read", "registry:read"})
WRITE: Final = frozenset({"jobs:write", "tasks:write", "bundles:write", "registry:write"})
ADMIN: Final = frozenset({"admin"})
SEND: Final = "commands:send"
RECEIVE: Final = "commands:receive"
SERVICE: Final = frozenset({SEND, RECEIVE})
"""Scopes for keys of a service, independent of the role."""
PLATFORM: Final = "platform"
"""Scope beyond one org: orgs, worker tokens, signing keys. The first key has it, and keys that such a key creates."""

ROLE_SCOPES: Final[dict[Role, frozenset[str]]] = {
    Role.READER: READ,
    Role.WRITER: READ | WRITE,
    Role.ADMIN: READ | WRITE | ADMIN,
}

_KEY = re.compile(r"ilk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_WORKER = re.compile(r"ilw_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NOBODY: Final = hashlib.sha256(b"").digest()


@dataclass(frozen=True)
class Principal:
    """An authenticated user of one org."""

    key_id: str
    org_id: UUID
    org: str
    user: str
    role: Role
    scopes: frozenset[str]
    service: str | None = None
    """The service of the org that the key acts for."""

    def require(self, scope: str) -> None:
        if scope not in self.scopes:
            raise Forbidden(f"This key lacks the scope {scope!r}; ask an admin of {self.org!r} for one that has it.")


@dataclass(frozen=True)
class WorkerIdentity:
    """An authenticated worker. `runtimes` None means all runtimes."""

    token_id: str
    name: str
    runtimes: tuple[str, ...] | None


class Principals:
    def __init__(
        self, database: Database, clock: Clock, *, cache_seconds: float = 2.0, issuer: Issuer | None = None
    ) -> None:
        self.members = Members(database, issuer)
        self._database = database
        self._clock = clock
        self._cache_for = timedelta(seconds=cache_seconds)
        self._workers: dict[str, tuple[datetime, WorkerIdentity]] = {}
        self._warm: dict[bytes, tuple[datetime, Principal]] = {}
        self._asked: dict[bytes, asyncio.Future[Principal]] = {}
        self._refused = Refused(clock)

    async def authenticate_warm(self, key: str) -> Principal:
        """Authenticates from a short cache, for hot paths that must not read a store.

        Revocation is delayed by as much.
        """
        digest, now = _hash(key), self._clock.now()
        known = self._warm.get(digest)
        if known and known[0] > now:
            return known[1]
        # Concurrent callers share one lookup; a busy key would otherwise cause hundreds at the same time.
        asked = self._asked.get(digest)
        if asked is None:
            asked = self._asked[digest] = asyncio.ensure_future(self._look_up_warm(key, digest, now))
            asked.add_done_callback(lambda done: self._answered(digest, done))
        return await asyncio.shield(asked)

    def _answered(self, digest: bytes, done: asyncio.Future[Principal]) -> None:
        del self._asked[digest]
        if not done.cancelled():
            done.exception()  # retrieve it, because all callers may be gone

    async def _look_up_warm(self, key: str, digest: bytes, now: datetime) -> Principal:
        principal = await self.authenticate(key)
        self._warm = {k: v for k, v in self._warm.items() if v[0] > now}
        self._warm[digest] = (now + self._cache_for, principal)
        return principal

    async def authenticate(self, key: str) -> Principal:
        match = _KEY.fullmatch(key)
        row: Any = None
        if match and key not in self._refused:
            async with self._database.connection() as connection:
                row = await _sql.find_key(connection, key_id=match[1])
        if not _proves(row, match and match[2]):
            self._refused.add(key)
            raise Unauthenticated("The API key is not valid; create one with `interlock users create`.")
        return Principal(
            key_id=row["key_id"],
            org_id=row["org_id"],
            org=row["org"],
            user=row["user_name"],
            role=Role(row["role"]),
            scopes=frozenset(row["scopes"]),
            service=row["service"],
        )

    async def authenticate_worker(self, token: str) -> WorkerIdentity:
        """Authenticates from a short cache, because every batch of a busy worker needs it.

        Revocation is delayed by as much.
        """
        digest = hashlib.sha256(token.encode()).hexdigest()
        now = self._clock.now()
        cached = self._workers.get(digest)
        if cached and cached[0] > now:
            return cached[1]
        identity = await self._find_worker(token)
        self._workers = {k: v for k, v in self._workers.items() if v[0] > now}
        self._workers[digest] = (now + self._cache_for, identity)
        return identity

    async def _find_worker(self, token: str) -> WorkerIdentity:
        match = _WORKER.fullmatch(token)
        row: Any = None
        if match and token not in self._refused:
            async with self._database.connection() as connection:
                row = await _sql.find_worker_token(connection, token_id=match[1])
        if not _proves(row, match and match[2]):
            self._refused.add(token)
            raise Unauthenticated("The worker token is not valid; create one with `interlock users worker-token`.")
        runtimes = row["runtimes"]
        return WorkerIdentity(row["token_id"], row["name"], tuple(runtimes) if runtimes is not None else None)

    async def create_key(self, request: KeyRequest, org_id: UUID, *, granted_by: Principal | None) -> KeyCreated:
        """Creates a key. `granted_by` is None only for the first key of an installation."""
        scopes = _scopes(request, granted_by)
        key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        async with self._database.connection() as connection:
            row = await _sql.insert_key(
                connection,
                key_id=key_id,
                org_id=org_id,
                user_name=request.user,
                role=request.role.value,
                scopes=sorted(scopes),
                service=request.service,
                secret_hash=_hash(secret),
                seconds=_seconds(request.expires_in_days),
            )
        if row is None:
            raise NotFound(
                f"Unknown service {request.service!r}; register it with `interlock service add NAME`.",
                code="unknown_service",
            )
        return KeyCreated(key=f"ilk_{key_id}_{secret}", view=_key_view(row))

    async def keys(self, org_id: UUID) -> list[KeyView]:
        async with self._database.connection() as connection:
            return [_key_view(row) for row in await _sql.list_keys(connection, org_id=org_id)]

    async def revoke_key(self, key_id: str, org_id: UUID) -> KeyView:
        async with self._database.connection() as connection:
            row = await _sql.revoke_key(connection, key_id=key_id, org_id=org_id)
        if row is None:
            raise NotFound(f"Key {key_id!r} does not exist in this org.")
        self._warm = {k: v for k, v in self._warm.items() if v[1].key_id != key_id}
        return _key_view(row)

    async def create_worker_token(self, request: WorkerTokenRequest) -> WorkerTokenCreated:
        token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        async with self._database.connection() as connection:
            row = await _sql.insert_worker_token(
                connection,
                token_id=token_id,
                name=request.name,
                runtimes=request.runtimes,
                secret_hash=_hash(secret),
                seconds=_seconds(request.expires_in_days),
            )
        return WorkerTokenCreated(token=f"ilw_{token_id}_{secret}", view=_token_view(row))

    async def worker_tokens(self) -> list[WorkerTokenView]:
        async with self._database.connection() as connection:
            return [_token_view(row) for row in await _sql.list_worker_tokens(connection)]

    async def revoke_worker_token(self, token_id: str) -> WorkerTokenView:
        async with self._database.connection() as connection:
            row = await _sql.revoke_worker_token(connection, token_id=token_id)
        if row is None:
            raise NotFound(f"Worker token {token_id!r} does not exist.")
        return _token_view(row)

    async def create_org(self, name: str) -> OrgView:
        async with self._database.connection() as connection:
            row = await _sql.insert_org(connection, name=name)
        if row is None:
            raise Conflict(f"The org {name!r} already exists.", code="org_exists")
        return OrgView(org_id=row["org_id"], name=row["name"])

    async def org(self, name: str) -> OrgView:
        async with self._database.connection() as connection:
            row = await org_by_name(connection, name)
        if row is None:
            raise NotFound(f"The org {name!r} does not exist.")
        return OrgView(org_id=row["org_id"], name=row["name"])


async def org_by_name(connection: Connection, name: str) -> Row | None:
    org: Row | None = await _sql.org_by_name(connection, name=name)
    return org


def _proves(row: Any, secret: str | None) -> bool:
    """Compares the hash even without a row, so that a guess always takes the same time."""
    same = hmac.compare_digest(_hash(secret or ""), row["secret_hash"] if row else _NOBODY)
    return bool(same and row is not None and secret and not row["revoked"] and not row["expired"])


def _hash(secret: str) -> bytes:
    # 256 random bits need no slow hash, because they cannot be guessed.
    return hashlib.sha256(secret.encode()).digest()


def _seconds(days: float | None) -> float | None:
    return None if days is None else days * 86_400


def _scopes(request: KeyRequest, granted_by: Principal | None) -> frozenset[str]:
    allowed = ROLE_SCOPES[request.role]
    if request.role is Role.ADMIN and (granted_by is None or PLATFORM in granted_by.scopes):
        allowed |= {PLATFORM}
    usual = allowed - {PLATFORM}
    if request.service is not None:
        allowed |= SERVICE
        usual = SERVICE
    if granted_by is None:
        return allowed
    wanted = frozenset(request.scopes) if request.scopes is not None else usual
    if unknown := wanted - allowed:
        raise BadRequest(
            f"A {request.role} key cannot have the scopes {sorted(unknown)}; choose from {sorted(allowed)}.",
            code="bad_scope",
        )
    if beyond := wanted - granted_by.scopes - SERVICE:
        raise Forbidden(
            f"This key cannot grant {sorted(beyond)}, because it does not have them. Request fewer `scopes`.",
            code="scope_not_held",
        )
    return wanted


def _key_view(row: Any) -> KeyView:
    return KeyView(
        key_id=row["key_id"],
        org=row["org"],
        user=row["user_name"],
        role=Role(row["role"]),
        scopes=list(row["scopes"]),
        service=row["service"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def _token_view(row: Any) -> WorkerTokenView:
    return WorkerTokenView(
        token_id=row["token_id"],
        name=row["name"],
        runtimes=list(row["runtimes"]) if row["runtimes"] is not None else None,
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


_members_sql = queries(__name__, "members")


class Members:
    """Members of orgs. Without an `issuer`, there is no identity provider, and users need API keys."""

    def __init__(self, database: Database, issuer: Issuer | None) -> None:
        self._database = database
        self._issuer = issuer

    @property
    def issuer_name(self) -> str | None:
        return None if self._issuer is None else self._issuer.name

    async def roles(self, issuer: str, subject: str) -> list[Row]:
        """Returns the orgs of a user with the role in each, by name."""
        async with self._database.connection() as connection:
            rows: list[Row] = await _members_sql.roles_of(connection, issuer=issuer, subject=subject)
        return rows

    def may_be(self, credential: str) -> bool:
        """Returns True if the credential is for the identity provider. API keys never contain a dot."""
        return self._issuer is not None and "." in credential

    async def authenticate(self, token: str, org: str | None) -> Principal:
        """Authenticates a user. Reads the role on every request, so that removing it takes effect immediately.

        `org` selects one of several orgs of the user.
        """
        issuer = self._provider()
        subject = await issuer.subject(token)
        row = _chosen(await self.roles(issuer.name, subject), org)
        role = Role(row["role"])
        return Principal(
            key_id=member_id(issuer.name, subject),
            org_id=row["org_id"],
            org=row["org"],
            user=subject,
            role=role,
            scopes=ROLE_SCOPES[role],
        )

    async def allow(self, request: MemberRequest, org_id: UUID, *, by: Principal) -> MemberView:
        issuer = self._provider()
        async with self._database.connection() as connection:
            row = await _members_sql.allow_member(
                connection,
                issuer=issuer.name,
                subject=request.subject,
                org_id=org_id,
                role=request.role.value,
                by=by.user,
            )
        return _view(row)

    async def disallow(self, subject: str, org_id: UUID) -> MemberView:
        issuer = self._provider()
        async with self._database.connection() as connection:
            row = await _members_sql.disallow_member(connection, issuer=issuer.name, subject=subject, org_id=org_id)
        if row is None:
            raise NotFound(f"{subject!r} is not a member of this org.")
        return _view(row)

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> MemberPage:
        issuer = self._provider()
        async with self._database.connection() as connection:
            rows = await _members_sql.members_of(
                connection, org_id=org_id, issuer=issuer.name, after=cursor or "", limit=limit
            )
        return MemberPage(members=[_view(row) for row in rows], next_cursor=next_cursor(rows, limit, "subject"))

    def _provider(self) -> Issuer:
        if self._issuer is None:
            raise Conflict(
                "No identity provider is configured: set oidc_issuer and oidc_audience, or "
                "create API keys with `interlock users create`.",
                code="no_identity_provider",
            )
        return self._issuer


def _chosen(rows: list[Any], org: str | None) -> Any:
    mine = [row for row in rows if org is None or row["org"] == org]
    if not mine:
        raise Forbidden(
            "You are not a member of any org here; an admin can add you with `interlock users allow`."
            if org is None
            else f"You are not a member of the org {org!r}.",
            code="not_a_member",
        )
    if len(mine) > 1:
        names = ", ".join(row["org"] for row in mine)
        raise BadRequest(
            f"You are in several orgs; select one with the header `X-Interlock-Org`: {names}.", code="which_org"
        )
    return mine[0]


def member_id(issuer: str, subject: str) -> str:
    """Returns an id for the user in place of a key id. It does not reveal the user's name."""
    digest = hashlib.sha256("\n".join((issuer, subject)).encode()).hexdigest()
    return f"oidc-{digest[:16]}"


def _view(row: Any) -> MemberView:
    return MemberView(subject=row["subject"], org=row["org"], role=Role(row["role"]), since=row["since"], by=row["by"])
