"""Webhooks: external calls without an API key, authenticated by a secret of the hook.

    hmac    X-Interlock-Signature: t=<unix seconds>,v1=<hex of HMAC-SHA256 over "{t}.{body}">
    token   X-Interlock-Token: the secret itself

Of a token, only the hash is stored. An HMAC cannot be verified without the secret, so that secret is stored sealed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

import structlog

from interlock.access.secrets import Seal
from interlock.clock import Clock
from interlock.dags import sources
from interlock.dags.definition import SourceKind, WebhookAuth
from interlock.dags.sources import Trigger, check_payload
from interlock.errors import ConfigurationError, Conflict, NotFound, Unauthenticated
from interlock.http.request_limits import Lockout, Refused, too_many_failures
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.dags import HookAccepted, HookSecret

_sql = queries(__name__, "sources")
log = structlog.get_logger()

WINDOW_SECONDS: Final = 300
"""Maximum difference between a signature's timestamp and our clock."""
OVERLAP_SECONDS: Final = 3600.0
"""Time for which the previous secret stays valid after a rotation."""
_SIGNATURE: Final = re.compile(r"t=([0-9]{1,12})((?:,v1=[0-9a-fA-F]{64}){1,5})")
_HOOK_ID: Final = re.compile(r"[A-Za-z0-9_-]{32}")
_KEY_LENGTH: Final = 255
_NOBODY: Final = secrets.token_urlsafe(32)
_MAX_PROVED: Final = 10_000
_PAGE: Final = 500


@dataclass(frozen=True)
class Call:
    """A call to a hook that is not authenticated yet."""

    hook_id: str
    body: bytes
    signature: str | None = None
    token: str | None = None
    key: str | None = None
    """Idempotency key of the call: the same key again is a duplicate."""
    peer: str = ""
    """The client address of the call."""


class Hooks:
    def __init__(self, database: Database, settings: Settings, clock: Clock, lockout: Lockout, seal: Seal) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._lockout = lockout
        self._seal = seal
        self._refused = Refused(clock)
        self._proved: OrderedDict[str, Row] = OrderedDict()
        """Hooks that a valid call has used, by id, as last looked up. They only decide whether a call from a locked-out
        address is worth a look-up."""

    async def receive(self, call: Call) -> HookAccepted:
        hook = await self._authenticate(call)
        check_payload(call.body, self._settings)
        trigger = Trigger(f"hook:{_key(call)}", call.body)

        async def work(connection: Connection) -> int:
            rows = await _sql.source_generations(
                connection, org_id=hook["org_id"], dag_name=hook["dag_name"], name=hook["job_name"]
            )
            jobs = [row["job_id"] for row in rows if row["kind"] == SourceKind.WEBHOOK]
            return await sources.accept(connection, jobs, [trigger])

        return HookAccepted(duplicate=not await self._database.run(work))

    async def _authenticate(self, call: Call) -> Row:
        """Returns the hook that the call may use. The lockout bounds how many look-ups guesses cost."""
        wait = self._lockout.wait(call.peer, [])
        if wait is not None and not self._proves(call, self._proved.get(call.hook_id)):
            raise too_many_failures(wait)
        hook = await self._find(call)
        if hook is None or not self._proves(call, hook):
            if hook is not None:
                self._refused.add(_credential(call))
            self._lockout.failed(call.peer)
            raise Unauthenticated("The hook does not exist, or the signature or token of the call is not valid for it.")
        self._proved[call.hook_id] = hook
        self._proved.move_to_end(call.hook_id)
        if len(self._proved) > _MAX_PROVED:
            self._proved.popitem(last=False)
        return hook

    async def _find(self, call: Call) -> Row | None:
        """Looks up the hook of a call. Returns None without a look-up for a call that no hook would accept."""
        if not call.token and not _SIGNATURE.fullmatch(call.signature or ""):
            return None
        if not _HOOK_ID.fullmatch(call.hook_id) or _credential(call) in self._refused:
            return None
        async with self._database.connection() as connection:
            found: Row | None = await _sql.find_hook(connection, hook_id=call.hook_id)
        if call.hook_id in self._proved:
            if found is None:
                del self._proved[call.hook_id]
            else:
                self._proved[call.hook_id] = found
        return found

    def _proves(self, call: Call, hook: Row | None) -> bool:
        """Verifies the call. Compares even for an unknown hook, so that timing does not reveal whether it exists."""
        if hook is not None and hook["auth"] == WebhookAuth.TOKEN:
            return _proves_token(call, [hook["secret_hash"], hook["previous_hash"]])
        sealed = [hook["sealed"], hook["previous_sealed"]] if hook is not None else [None, None]
        return self._proves_signature(call, [self._opened(hook, each) for each in sealed])

    def _opened(self, hook: Row | None, sealed: bytes | None) -> str | None:
        if hook is None or sealed is None:
            return None
        try:
            return self._seal.open(sealed, _purpose(hook["org_id"], hook["dag_name"], hook["job_name"])).decode()
        except ConfigurationError as error:
            log.warning("hook.not_opened", dag=hook["dag_name"], job=hook["job_name"], reason=error.detail)
            return None

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
        """Creates or rotates the secret. Only this response contains it."""
        secret = secrets.token_urlsafe(32)

        async def work(connection: Connection) -> tuple[Row, str]:
            auth = await self._auth(connection, dag, job, org_id)
            where = {"org_id": org_id, "dag_name": dag, "name": job}
            sealed = self._seal.seal(secret.encode(), _purpose(org_id, dag, job)) if auth == WebhookAuth.HMAC else None
            kept = {"secret_hash": _hash(secret), "sealed": sealed}
            row = await _sql.insert_hook(connection, hook_id=secrets.token_urlsafe(24), **where, **kept)
            if row is None and not rotate:
                raise Conflict(
                    f"The hook of job {job!r} already has a secret; it was shown only when it was created. Send "
                    '"rotate": true for a new one; the old one stays valid for another hour.',
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
                f"Job {job!r} is not a webhook, so it has no secret. Write `source: {{kind: webhook}}` and deploy.",
                code="not_a_webhook",
            )
        return str(rows[0]["auth"] or WebhookAuth.HMAC)


def _purpose(org_id: UUID, dag: str, job: str) -> str:
    return f"hook/{org_id}/{dag}/{job}"


async def seal_stored_hooks(database: Database, seal: Seal) -> None:
    """Seals the secrets that an older version stored in clear, a page at a time."""

    def sealed(row: Row, secret: str | None) -> bytes | None:
        of = _purpose(row["org_id"], row["dag_name"], row["job_name"])
        return None if secret is None else seal.seal(secret.encode(), of)

    async def work(connection: Connection) -> int:
        rows = await _sql.clear_secrets(connection, limit=_PAGE)
        if rows:
            await _sql.seal_secrets(
                connection,
                hook_ids=[row["hook_id"] for row in rows],
                sealed=[sealed(row, row["secret"]) for row in rows],
                previous_sealed=[sealed(row, row["previous_secret"]) for row in rows],
            )
        return len(rows)

    while await database.run(work) == _PAGE:
        continue


def _credential(call: Call) -> str:
    """The token or signature with the hook that it is for; a signature is good for one body."""
    body = "" if call.token else hashlib.sha256(call.body).hexdigest()
    return f"{call.hook_id} {call.token} {call.signature} {body}"


def _proves_token(call: Call, known: list[bytes | None]) -> bool:
    given = _hash(call.token or "")
    right = False
    for stored in known:
        right |= hmac.compare_digest(given, stored or _hash(_NOBODY)) and stored is not None
    return right and bool(call.token)


def _key(call: Call) -> str:
    """Returns the deduplication key. Without a key it is the signature, so a replayed call creates no second task."""
    text = call.key or call.signature or str(uuid4())
    return text if len(text) <= _KEY_LENGTH else hashlib.sha256(text.encode()).hexdigest()


def _hash(secret: str) -> bytes:
    # 256 random bits need no slow hash: they cannot be guessed.
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def signature(secret: str, body: bytes, moment: int) -> str:
    """Returns the value of the X-Interlock-Signature header that a caller sends."""
    digest = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"
