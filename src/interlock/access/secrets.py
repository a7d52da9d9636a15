"""Secrets of an org: admins set and remove them, tasks of the org's jobs receive them, and no API shows their values.

The database holds only sealed values. A value is opened when a worker claims a task whose config refers to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol
from uuid import UUID

import msgspec
import structlog

from interlock.access.principals import Principal
from interlock.errors import BadRequest, ConfigurationError, Conflict, NotFound
from interlock.http.cursors import next_cursor
from interlock.outbound.guard import plain_hosts
from interlock.settings import RuntimeKind
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.access import NAMED, OrgSecretPage, OrgSecretRequest, OrgSecretView, TaskSecret, secret_names

_sql = queries(__name__, "secrets")
log = structlog.get_logger()

MOST: Final = 200
"""Limit per org."""


class Sealing(Protocol):
    """Encrypts a value for a purpose, and decrypts it only for the same purpose."""

    def seal(self, secret: bytes, purpose: str) -> bytes: ...

    def open(self, sealed: bytes, purpose: str) -> bytes:
        """Raises ConfigurationError if the value cannot be opened."""


class Secrets:
    def __init__(self, database: Database, seal: Sealing) -> None:
        self._database, self._seal = database, seal

    # For admins

    async def set(self, name: str, request: OrgSecretRequest, by: Principal) -> OrgSecretView:
        """Creates a secret, or replaces the value and hosts of an existing one."""
        _check(name, request)
        try:
            hosts = plain_hosts(request.hosts)
        except ValueError as error:
            raise BadRequest(f"{error}", code="bad_host") from None
        sealed = self._seal.seal(request.value.encode(), _purpose(by.org_id, name))
        async with self._database.transaction() as connection:
            await _sql.lock_org(connection, org_id=by.org_id)
            if await _sql.count_others(connection, org_id=by.org_id, name=name) >= MOST:
                raise Conflict(f"An org has at most {MOST} secrets; remove one first.", code="too_many_secrets")
            row = await _sql.set_secret(
                connection, org_id=by.org_id, name=name, sealed=sealed, hosts=hosts, set_by=by.user
            )
        log.info("secret.set", org=by.org, name=name, version=row["version"], by=by.user)
        return _view(row)

    async def remove(self, name: str, by: Principal) -> OrgSecretView:
        """Removes a secret. Tasks that refer to it fail from their next claim on."""
        async with self._database.connection() as connection:
            row = await _sql.remove_secret(connection, org_id=by.org_id, name=name)
        if row is None:
            raise NotFound(f"There is no secret {name[:200]!r} in this org.")
        log.info("secret.removed", org=by.org, name=name, version=row["version"], by=by.user)
        return _view(row)

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> OrgSecretPage:
        async with self._database.connection() as connection:
            rows = await _sql.list_secrets(connection, org_id=org_id, after=cursor or "", limit=limit)
        return OrgSecretPage(secrets=[_view(row) for row in rows], next_cursor=next_cursor(rows, limit, "name"))

    # For tasks

    async def opened(self, org_id: UUID, names: Sequence[str]) -> list[TaskSecret]:
        """Returns one secret per name, with the reason if there is no value."""
        async with self._database.connection() as connection:
            rows = await _sql.sealed_secrets(connection, org_id=org_id, names=list(names))
        found = {row["name"]: row for row in rows}
        return [self._opened(org_id, name, found.get(name)) for name in names]

    def _opened(self, org_id: UUID, name: str, row: Row | None) -> TaskSecret:
        if row is None:
            return TaskSecret(name, None, [], _unknown([name]), missing=True)
        try:
            value = self._seal.open(row["sealed"], _purpose(org_id, name)).decode()
        except ConfigurationError as error:
            log.warning("secret.not_opened", org_id=str(org_id), name=name, reason=error.detail)
            return TaskSecret(name, None, [], f"The secret {name!r} cannot be opened: an admin must set it again.")
        return TaskSecret(name, value, list(row["hosts"]))


async def check_references(
    connection: Connection, org_id: UUID, jobs: Iterable[tuple[RuntimeKind, dict[str, object]]]
) -> None:
    """Raises BadRequest for configs that refer to secrets which their tasks could not receive."""
    named: list[str] = []
    for kind, config in jobs:
        names = secret_names(msgspec.json.encode(config).decode())
        if names and kind is not RuntimeKind.QUEUE:
            raise BadRequest(
                f"The config refers to the secret {names[0][:100]!r}, but only workers receive secrets: "
                "untrusted code and operators inside the dispatcher do not.",
                code="secret_not_for_runtime",
            )
        named += names
    for name in named:
        if not re.match(NAMED, name):
            raise BadRequest(
                f"${{secret:{name[:100]}}} is not a valid reference: use letters, digits, _ and -, as in "
                "${secret:RPC_KEY}.",
                code="bad_secret_reference",
            )
    if named:
        rows = await _sql.known_secrets(connection, org_id=org_id, names=named)
        if missing := sorted(set(named) - {row["name"] for row in rows}):
            raise BadRequest(_unknown(missing), code="unknown_secret")


def _unknown(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:10]))
    return f"There is no secret {shown} in this org: an admin sets it with `interlock secret set {names[0]}`."


def _check(name: str, request: OrgSecretRequest) -> None:
    if not re.match(NAMED, name):
        raise BadRequest(
            "A secret's name must start with a letter or _, and have at most 100 letters, digits, _ and -.",
            code="bad_secret_name",
        )
    if "\0" in request.value or request.value != request.value.strip():
        raise BadRequest(
            "`value` must not start or end with white space, nor contain NUL: check what was pasted.",
            code="bad_secret_value",
        )


def _purpose(org_id: UUID, name: str) -> str:
    return f"org-secret/{org_id}/{name}"


def _view(row: Row) -> OrgSecretView:
    return OrgSecretView(
        name=row["name"],
        hosts=list(row["hosts"]),
        version=row["version"],
        set_by=row["set_by"],
        set_at=row["set_at"],
    )
