"""Users of the identity provider: the orgs they belong to, and their role in each."""

from __future__ import annotations

import hashlib
from typing import Any
from uuid import UUID

from interlock.access.oidc import Issuer
from interlock.access.principals import ROLE_SCOPES, Principal
from interlock.adapters.postgres import Database, queries
from interlock.errors import BadRequest, Conflict, Forbidden, NotFound
from interlock.wire import MemberPage, MemberRequest, MemberView, Role

_sql = queries("members")


class Members:
    """`issuer` None: there is no identity provider, and API keys alone let users in."""

    def __init__(self, database: Database, issuer: Issuer | None) -> None:
        self._database = database
        self._issuer = issuer

    def may_be(self, credential: str) -> bool:
        """Whether a bearer is for the identity provider to judge. No API key has a dot."""
        return self._issuer is not None and "." in credential

    async def authenticate(self, token: str, org: str | None) -> Principal:
        """The role is read with every request: taking it away works at once. `org`: which one, for a member of many."""
        issuer = self._provider()
        subject = await issuer.subject(token)
        async with self._database.connection() as connection:
            rows = await _sql.roles_of(connection, issuer=issuer.name, subject=subject)
        row = _chosen(rows, org)
        role = Role(row["role"])
        return Principal(
            key_id=_id(issuer.name, subject),
            org_id=row["org_id"],
            org=row["org"],
            user=subject,
            role=role,
            scopes=ROLE_SCOPES[role],
        )

    async def allow(self, request: MemberRequest, org_id: UUID, *, by: Principal) -> MemberView:
        issuer = self._provider()
        async with self._database.connection() as connection:
            row = await _sql.allow_member(
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
            row = await _sql.disallow_member(connection, issuer=issuer.name, subject=subject, org_id=org_id)
        if row is None:
            raise NotFound(f"{subject!r} is no member of this org.")
        return _view(row)

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> MemberPage:
        issuer = self._provider()
        async with self._database.connection() as connection:
            rows = await _sql.members_of(connection, org_id=org_id, issuer=issuer.name, after=cursor or "", most=limit)
        return MemberPage(
            members=[_view(row) for row in rows], next_cursor=rows[-1]["subject"] if len(rows) == limit else None
        )

    def _provider(self) -> Issuer:
        if self._issuer is None:
            raise Conflict(
                "There is no identity provider whose users could be members: set oidc_issuer and oidc_audience, or "
                "make API keys with `interlock users create`.",
                code="no_identity_provider",
            )
        return self._issuer


def _chosen(rows: list[Any], org: str | None) -> Any:
    mine = [row for row in rows if org is None or row["org"] == org]
    if not mine:
        raise Forbidden(
            "You are not a member here; an admin can let you in with `interlock users allow`."
            if org is None
            else f"You are not a member of an org {org!r}.",
            code="not_a_member",
        )
    if len(mine) > 1:
        names = ", ".join(row["org"] for row in mine)
        raise BadRequest(
            f"You are in several orgs: say which with `X-Interlock-Org`, one of {names}.", code="which_org"
        )
    return mine[0]


def _id(issuer: str, subject: str) -> str:
    """Stands for the user where a key's id would, and gives nobody's name away."""
    digest = hashlib.sha256("\n".join((issuer, subject)).encode()).hexdigest()
    return f"oidc-{digest[:16]}"


def _view(row: Any) -> MemberView:
    return MemberView(subject=row["subject"], org=row["org"], role=Role(row["role"]), since=row["since"], by=row["by"])
