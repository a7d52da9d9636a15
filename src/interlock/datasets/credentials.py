"""Mints object-store credentials for one attempt, limited to the prefixes in its capability token."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from interlock.access.object_tokens import ObjectTokens
from interlock.access.prefixes import Prefix, canonical_all, session_policy
from interlock.access.tokens import Claims
from interlock.datasets.files import Files
from interlock.errors import Fenced, Forbidden, Unavailable
from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.objects.s3 import SHORTEST_SECONDS, Sts
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.completion import Attempts
from interlock.tasks.shards import find_task, shard_of
from interlock.telemetry import CREDENTIALS_MINTED
from interlock.wire.access import TaskCredentials
from interlock.wire.attempts import Release

_sql = queries(__name__, "credentials")

_S3: Final = "s3://"
_SKEW_SECONDS: Final = 5
"""Allowed clock skew between a dispatcher and the database."""


@dataclass(frozen=True, slots=True)
class _Held:
    lease_token: UUID
    expires_at: datetime


class Credentials:
    def __init__(
        self,
        database: Database,
        settings: Settings,
        tasks: Attempts,
        files: Files,
        tokens: ObjectTokens,
        sts: Sts | None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._tasks = tasks
        self._files = files
        self._tokens = tokens
        self._sts = sts

    async def mint(self, capability: Claims, lease_token: UUID | None = None) -> TaskCredentials:
        """Mints credentials for an attempt that holds its task and was not asked to stop.

        Raises Fenced for any other attempt, and for a `lease_token` that is not the attempt's.
        """
        held = await self._hold(capability, lease_token)
        root = self._settings.objects_root
        read = canonical_all(capability.s3.read_prefixes, root)
        write = canonical_all(capability.s3.write_prefixes, root)
        if not read and not write:
            raise Forbidden(
                "This task neither reads nor writes files, so it has no prefix to get credentials for.",
                code="nothing_granted",
            )
        if root.startswith(_S3):
            minted = await self._session(capability, read, write, held.expires_at)
        else:
            minted = await self._object_token(capability, held, read, write)
        CREDENTIALS_MINTED.labels(scheme=minted.scheme).inc()
        return minted

    async def close(self) -> None:
        if self._sts is not None:
            await self._sts.close()

    async def _hold(self, capability: Claims, lease_token: UUID | None) -> _Held:
        """Returns the attempt's lease. Records the prefixes to sweep before the attempt can write to them."""
        task_id, attempt = capability.task_id, capability.attempt

        async def work(connection: Connection) -> Row | None:
            # The request may omit the lease token. Then the shard has to be looked up.
            row: Row | None = await _sql.minting(
                connection,
                shard=shard_of(lease_token) if lease_token else await find_task(connection, task_id),
                task_id=task_id,
                org_id=capability.org_id,
                attempt=attempt,
                lease_token=lease_token,
                issued_at=float(capability.iat + _SKEW_SECONDS),
            )
            if row is not None and row["alive"] and not row["cancel_requested"]:
                await self._files.expect(connection, [row])
                await failpoint("credentials.before_commit")
            return row

        row = await self._database.run(work)
        if row is None:
            if lease_token is None:
                raise Fenced("The attempt of this token no longer holds its task.", stale="attempt")
            raise await self._tasks.fenced(Release(task_id=task_id, attempt=attempt, lease_token=lease_token))
        if row["cancel_requested"]:
            raise Fenced("The task is being canceled: its attempt gets no more credentials.", stale="status")
        if not row["alive"]:
            raise Fenced("The lease has expired; send a heartbeat first.", stale="lease_token")
        return _Held(row["lease_token"], row["lease_expires_at"])

    async def _session(
        self, capability: Claims, read: list[Prefix], write: list[Prefix], expires_at: datetime
    ) -> TaskCredentials:
        if self._sts is None:
            raise Unavailable(
                "This installation cannot mint S3 credentials for tasks: set credentials_role_arn on its dispatchers.",
                code="no_credentials_role",
            )
        seconds = int((expires_at - self._database.clock.now()).total_seconds())
        # An STS session may outlive the lease. The policy's expiry does not.
        policy = session_policy(read, write, until=expires_at if seconds < SHORTEST_SECONDS else None)
        role = await self._sts.assume(session_name(capability.task_id, capability.attempt), policy, seconds)
        return TaskCredentials(
            scheme="s3",
            expiration=min(expires_at, role.expires_at),
            read_prefixes=[str(prefix) for prefix in read],
            write_prefixes=[str(prefix) for prefix in write],
            endpoint=self._settings.bucket_base_url,
            region=self._settings.bucket_region,
            access_key_id=role.access_key_id,
            secret_access_key=role.secret_access_key,
            session_token=role.session_token,
        )

    async def _object_token(
        self, capability: Claims, held: _Held, read: list[Prefix], write: list[Prefix]
    ) -> TaskCredentials:
        # No longer than a capability token: the signing key may be retired after that.
        longest = self._database.clock.now() + timedelta(seconds=self._settings.token_ttl_seconds)
        expires_at = min(held.expires_at, longest)
        kid = await self._tasks.active_kid()
        return TaskCredentials(
            scheme="file",
            expiration=expires_at,
            read_prefixes=[str(prefix) for prefix in read],
            write_prefixes=[str(prefix) for prefix in write],
            endpoint=self._settings.objects_base_url,
            object_token=await self._tokens.issue(capability, held.lease_token, expires_at, kid),
        )


def session_name(task_id: UUID, attempt: int) -> str:
    """Returns the session name that appears in the bucket's access logs."""
    return f"task-{task_id}-{attempt}"
