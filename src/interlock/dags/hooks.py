"""Webhooks: calls from outside, without an API key, that prove themselves by a secret of their own.

    hmac    X-Interlock-Signature: t=<unix seconds>,v1=<hex of HMAC-SHA256 over "{t}.{body}">
    token   X-Interlock-Token: the secret itself

A token's hash is all that is stored. An HMAC cannot be checked without the secret, so that one is stored as it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.clock import Clock
from interlock.dags import triggers
from interlock.dags.definition import SourceKind, WebhookAuth
from interlock.dags.triggers import Trigger, check_payload
from interlock.errors import Conflict, NotFound, Unauthenticated
from interlock.settings import Settings
from interlock.wire import HookAccepted, HookSecret

_sql = queries("sources")

WINDOW_SECONDS: Final = 300
"""How far a signature's time may be from ours."""
OVERLAP_SECONDS: Final = 3600.0
"""How long a secret is good after the next one was made."""
_SIGNATURE: Final = re.compile(r"t=([0-9]{1,12})((?:,v1=[0-9a-fA-F]{64}){1,5})")
_KEY_LENGTH: Final = 255
_NOBODY: Final = secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Call:
    """What somebody has sent to a hook, not yet believed."""

    hook_id: str
    body: bytes
    signature: str | None = None
    token: str | None = None
    key: str | None = None
    """Tells one call from another; the same key again is the same call."""


class Hooks:
    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock

    async def receive(self, call: Call) -> HookAccepted:
        async with self._database.connection() as connection:
            hook = await _sql.find_hook(connection, hook_id=call.hook_id)
        if not self._proves(call, hook) or hook is None:
            raise Unauthenticated("There is no such hook, or the call does not prove that it may use it.")
        check_payload(call.body, self._settings)
        trigger = Trigger(f"hook:{_key(call)}", call.body)

        async def work(connection: Connection) -> int:
            rows = await _sql.source_generations(
                connection, org_id=hook["org_id"], dag_name=hook["dag_name"], name=hook["job_name"]
            )
            jobs = [row["job_id"] for row in rows if row["kind"] == SourceKind.WEBHOOK]
            return await triggers.accept(connection, jobs, [trigger])

        return HookAccepted(duplicate=not await self._database.run(work))

    def _proves(self, call: Call, hook: Row | None) -> bool:
        """Compares even when there is nothing to compare with, so that an unknown hook takes the same time."""
        if hook is not None and hook["auth"] == WebhookAuth.TOKEN:
            return _proves_token(call, [hook["secret_hash"], hook["previous_hash"]])
        known = [hook["secret"], hook["previous_secret"]] if hook is not None else [None, None]
        return self._proves_signature(call, known)

    def _proves_signature(self, call: Call, known: list[str | None]) -> bool:
        found = _SIGNATURE.fullmatch(call.signature or "")
        sent, given = (found[1], found[2].lower().split(",v1=")[1:]) if found else ("0", [""])
        signed = f"{sent}.".encode() + call.body
        right = False
        for secret in known:
            expected = hmac.new((secret or _NOBODY).encode(), signed, hashlib.sha256).hexdigest()
            for one in given:
                right |= hmac.compare_digest(expected, one) and secret is not None
        return right and abs(self._clock.now().timestamp() - int(sent)) <= WINDOW_SECONDS

    async def make_secret(self, dag: str, job: str, org_id: UUID, *, rotate: bool) -> HookSecret:
        """The secret is shown here and never again."""
        secret = secrets.token_urlsafe(32)

        async def work(connection: Connection) -> tuple[Row, str]:
            auth = await self._auth(connection, dag, job, org_id)
            where = {"org_id": org_id, "dag_name": dag, "name": job}
            kept = {"secret_hash": _hash(secret), "secret": secret if auth == WebhookAuth.HMAC else None}
            row = await _sql.insert_hook(connection, hook_id=secrets.token_urlsafe(24), **where, **kept)
            if row is None and not rotate:
                raise Conflict(
                    f"The hook of job {job!r} has a secret, which was shown when it was made. Ask with "
                    '"rotate": true for a new one; the old one is good for another hour.',
                    code="secret_exists",
                )
            if row is None:
                row = await _sql.rotate_hook(connection, overlap_seconds=OVERLAP_SECONDS, **where, **kept)
            return row, auth

        row, auth = await self._database.run(work)
        return HookSecret(
            hook_id=row["hook_id"],
            path=f"/v1/hooks/{row['hook_id']}",
            auth=auth,
            secret=secret,
            previous_until=row["previous_until"],
        )

    async def _auth(self, connection: Connection, dag: str, job: str, org_id: UUID) -> str:
        rows = await _sql.source_generations(connection, org_id=org_id, dag_name=dag, name=job)
        if not rows:
            raise NotFound(f"There is no job {job!r} of DAG {dag!r} in this org.")
        if rows[0]["kind"] != SourceKind.WEBHOOK:
            raise Conflict(
                f"Job {job!r} is no webhook, so that it has no secret. Write `source: {{kind: webhook}}` and deploy.",
                code="not_a_webhook",
            )
        return str(rows[0]["auth"] or WebhookAuth.HMAC)


def _proves_token(call: Call, known: list[bytes | None]) -> bool:
    given = _hash(call.token or "")
    right = False
    for stored in known:
        right |= hmac.compare_digest(given, stored or _hash(_NOBODY)) and stored is not None
    return right and bool(call.token)


def _key(call: Call) -> str:
    """Of a call without a key, its signature: who repeats what was overheard makes no second task."""
    text = call.key or call.signature or str(uuid4())
    return text if len(text) <= _KEY_LENGTH else hashlib.sha256(text.encode()).hexdigest()


def _hash(secret: str) -> bytes:
    # 256 random bits need no slow hash: there is nothing to guess from.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def signature(secret: str, body: bytes, moment: int) -> str:
    """What a caller writes into X-Interlock-Signature."""
    digest = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"
