"""Secrets of an org: admins set and remove them, tasks of the org's jobs receive them, and no API shows their values.

The database holds only sealed values. A value is opened when a worker claims a task whose config refers to it.

Services' signing keys are sealed as well: the database alone does not allow anybody to sign. The encryption key is a
file in the folder of the signing keys, shared by all processes of the platform. Each process that seals or opens
secrets calls `require_seal` when it starts: on a second host without the file, it would create another key and seal
secrets that no other process can open.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID

import msgspec
import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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


SECRET_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_CHECK: Final = b"interlock"
_CHECK_PURPOSE: Final = "seal-check"

_seals_sql = queries(__name__, "seals")


class Seal:
    """AES-256-GCM. The purpose of a secret is authenticated with it: a secret that was moved to another row does not
    open."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "bus-seal.key"
        self._cipher: AESGCM | None = None

    def seal(self, secret: bytes, purpose: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._opened().encrypt(nonce, secret, purpose.encode())

    def open(self, sealed: bytes, purpose: str) -> bytes:
        if self._cipher is None and not self._file.exists():
            raise ConfigurationError(f"{self._file} does not exist, and the database has secrets. {self._remedy}")
        try:
            return self._opened().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], purpose.encode())
        except InvalidTag:
            raise ConfigurationError(
                f"A secret in the database was not sealed with {self._file}. {self._remedy}"
            ) from None

    @property
    def _remedy(self) -> str:
        return (
            f"Copy {self._file.name} there from the keys_dir of the host that was started first (mode 0600). If no "
            "host has it any more, the sealed secrets are lost: docs/bus.md explains how to start with a new one."
        )

    def _opened(self) -> AESGCM:
        if self._cipher is None:
            self._cipher = AESGCM(self._read() if self._file.exists() else self._make())
        return self._cipher

    def _make(self) -> bytes:
        """Writes a temporary file and links it, which fails if the key exists: of two processes, one creates it for
        both."""
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._file.with_name(f".{self._file.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(fresh, self._file)
        except FileExistsError:
            return self._read()
        finally:
            fresh.unlink()
        return self._read()

    def _read(self) -> bytes:
        key = self._file.read_bytes()
        if len(key) != SECRET_BYTES:
            raise ConfigurationError(
                f"{self._file} must have {SECRET_BYTES} bytes, but has {len(key)}; restore it from a copy."
            )
        return key


async def require_seal(database: Database, seal: Seal) -> None:
    """Raises ConfigurationError unless `seal` opens the secrets of this database.

    The first start writes a check value. It creates the key file before that row: after a crash in between, the next
    start uses the file. Of several first starts, one writes the row, and a host with another file is refused.
    """

    async def work(connection: Connection) -> None:
        stored = await _seals_sql.check_value(connection)
        if stored is None:
            first = await _seals_sql.first_key(connection)
            if first is not None:
                seal.open(first["sealed"], purpose(first["org_id"], first["service"], first["number"]))
            await _seals_sql.keep_check_value(connection, sealed=seal.seal(_CHECK, _CHECK_PURPOSE))
            stored = await _seals_sql.check_value(connection)
        seal.open(stored, _CHECK_PURPOSE)

    await database.run(work)


def purpose(org_id: object, service: str, number: int) -> str:
    """Returns the purpose of one version of a service's secret."""
    return f"bus-key/{org_id}/{service}/{number}"
