"""Users of the identity provider: the orgs they belong to, and their role in each."""

from __future__ import annotations

import hashlib
from typing import Any
from uuid import UUID

from interlock.access.oidc import Issuer
from interlock.access.principals import ROLE_SCOPES, Principal
from interlock.errors import BadRequest, Conflict, Forbidden, NotFound
from interlock.stores.postgres import Database, queries
from interlock.wire import MemberPage, MemberRequest, MemberView, Role

_sql = queries("access", "members")


class Members:
    """Members of orgs. Without an `issuer`, there is no identity provider, and users need API keys."""

    def __init__(self, database: Database, issuer: Issuer | None) -> None:
        self._database = database
        self._issuer = issuer

    def may_be(self, credential: str) -> bool:
        """Returns True if the credential is for the identity provider. API keys never contain a dot."""
        return self._issuer is not None and "." in credential

    async def authenticate(self, token: str, org: str | None) -> Principal:
        """Authenticates a user. Reads the role on every request, so that removing it takes effect immediately.

        `org` selects one of several orgs of the user.
        """
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
            raise NotFound(f"{subject!r} is not a member of this org.")
        return _view(row)

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> MemberPage:
        issuer = self._provider()
        async with self._database.connection() as connection:
            rows = await _sql.members_of(connection, org_id=org_id, issuer=issuer.name, after=cursor or "", limit=limit)
        return MemberPage(
            members=[_view(row) for row in rows], next_cursor=rows[-1]["subject"] if len(rows) == limit else None
        )

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


def _id(issuer: str, subject: str) -> str:
    """Returns an id for the user in place of a key id. It does not reveal the user's name."""
    digest = hashlib.sha256("\n".join((issuer, subject)).encode()).hexdigest()
    return f"oidc-{digest[:16]}"


def _view(row: Any) -> MemberView:
    return MemberView(subject=row["subject"], org=row["org"], role=Role(row["role"]), since=row["since"], by=row["by"])
