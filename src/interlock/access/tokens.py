"""Capability tokens: what one attempt of one task may read and write, as an ES256 JWT.

Whatever is missing, malformed, unknown or disagreeing is refused; a refusal says nothing about the task.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID, uuid4

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from msgspec import Meta, Struct

from interlock.access.keyring import Keyring
from interlock.adapters.postgres import Database, queries
from interlock.clock import Clock
from interlock.errors import Forbidden, Unauthenticated
from interlock.wire import Attempt, DatasetRef, TaskInput, WriteGrant

AUDIENCE: Final = "trace.task"
ALGORITHM: Final = "ES256"
MAX_TOKEN_BYTES: Final = 8192
MAX_PRESENTED_BYTES: Final = 2 * MAX_TOKEN_BYTES
_CACHED: Final = 10_000
_SKEW_SECONDS: Final = 60
_FILES: Final = "parquet"
"""The storage that is read as files; of others a token names the dataset alone."""
_GLOB: Final = "**/*.parquet"

# One spelling per token. 64 bytes of signature leave four bits of the last character unused: they must be zero.
_COMPACT: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{85}[AQgw]")

_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_sql = queries("principals")


class _OneSignature(ECAlgorithm):
    """ES256 with the smaller `s` of the two that verify: nobody can turn a token into another one that is as good."""

    def sign(self, msg: bytes, key: ec.EllipticCurvePrivateKey) -> bytes:
        signature = super().sign(msg, key)
        s = int.from_bytes(signature[32:])
        return signature[:32] + min(s, _ORDER - s).to_bytes(32)

    def verify(self, msg: bytes, key: Any, sig: bytes) -> bool:
        return 2 * int.from_bytes(sig[32:]) < _ORDER and super().verify(msg, key, sig)


_jws: Final = jwt.PyJWS(algorithms=[])
_jws.register_algorithm(ALGORITHM, _OneSignature(ECAlgorithm.SHA256, ec.SECP256R1))

Time = Annotated[int, Meta(ge=0, le=2**53)]


class Prefixes(Struct, frozen=True, forbid_unknown_fields=True):
    read_prefixes: list[str]
    write_prefixes: list[str]


class Claims(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Field names are the wire's. Types are strict: a token with `attempt: "1"`, or with a claim more, is no token."""

    iss: str
    aud: str
    sub: str
    exp: Time
    iat: Time
    jti: str
    org_id: UUID
    task_id: UUID
    attempt: Attempt
    datasets: list[dict[str, Any]]
    s3: Prefixes
    capability_id: UUID | None = None


@dataclass(frozen=True)
class Grant:
    """What a token is made from."""

    org_id: UUID
    task_id: UUID
    attempt: int
    outputs: Sequence[WriteGrant]
    inputs: Sequence[TaskInput] = ()


def read_prefix(root: str, dataset: UUID, version: UUID) -> str:
    return f"{root}/dataset/{dataset}/version/{version}/"


def write_prefix(root: str, task_id: UUID, attempt: int, dataset: UUID, version: UUID) -> str:
    return f"{read_prefix(root, dataset, version)}_attempts/{task_id}/{attempt}/"


def write_grants(root: str, task_id: UUID, attempt: int, outputs: Sequence[DatasetRef]) -> list[WriteGrant]:
    """The attempt's own prefixes: nobody else writes there, and nobody reads what is not committed."""
    return [
        WriteGrant(
            output_index=index,
            dataset_uuid=output.dataset_uuid,
            dataset_version=output.dataset_version,
            write_prefix=write_prefix(root, task_id, attempt, output.dataset_uuid, output.dataset_version),
            buffer_prefix=f"{root}/buffers/{output.dataset_uuid}/{task_id}/{attempt}/",
        )
        for index, output in enumerate(outputs)
    ]


class CapabilityTokens:
    def __init__(self, database: Database, keyring: Keyring, clock: Clock, *, issuer: str, ttl_seconds: float) -> None:
        self._database = database
        self._keyring = keyring
        self._clock = clock
        self._issuer = issuer
        self._ttl = ttl_seconds
        self._verified: OrderedDict[str, tuple[str, Claims]] = OrderedDict()

    async def issue(self, grant: Grant, kid: str) -> str:
        prefixes = [prefix for output in grant.outputs for prefix in (output.write_prefix, output.buffer_prefix)]
        # The same dataset under two conditions is one grant: a condition narrows what is read, not what may be.
        read = {each.dataset_version: each for each in grant.inputs}.values()
        files = [each.read_prefix for each in read if each.storage == _FILES]
        claims = self._claims(grant, Prefixes(read_prefixes=files, write_prefixes=prefixes))
        claims = msgspec.structs.replace(claims, datasets=[_dataset_claim(each) for each in read])
        token = self._sign(claims, kid)
        if len(token) <= MAX_TOKEN_BYTES:
            return token
        return await self._issue_by_reference(claims, kid)

    async def renewed_if_due(self, claims: Claims, active_kid: Callable[[], Awaitable[str]]) -> str | None:
        """A fresh token for the same capability once a third of its life is left."""
        if claims.exp - self._clock.now().timestamp() > self._ttl / 3:
            return None
        if claims.capability_id is not None:
            async with self._database.connection() as connection:
                await _sql.renew_capability(connection, capability_id=claims.capability_id, seconds=2 * self._ttl)
            claims = msgspec.structs.replace(claims, s3=Prefixes([], []), datasets=[])
        now = int(self._clock.now().timestamp())
        fresh = msgspec.structs.replace(claims, iat=now, exp=now + int(self._ttl), jti=str(uuid4()))
        return self._sign(fresh, await active_kid())

    async def verify(self, token: str) -> Claims:
        known = self._verified.get(token)
        if known is None:
            known = self._verified[token] = await self._verify_anew(token)
            if len(self._verified) > _CACHED:
                self._verified.popitem(last=False)
        kid, claims = known
        if await self._keyring.public(kid) is None:
            raise _refused()
        if claims.exp <= self._clock.now().timestamp():
            raise Unauthenticated(
                "The capability token has expired; heartbeats renew it in time.", code="token_expired"
            )
        return claims

    def _claims(self, grant: Grant, prefixes: Prefixes) -> Claims:
        now = int(self._clock.now().timestamp())
        return Claims(
            iss=self._issuer,
            aud=AUDIENCE,
            sub=f"task:{grant.task_id}",
            exp=now + int(self._ttl),
            iat=now,
            jti=str(uuid4()),
            org_id=grant.org_id,
            task_id=grant.task_id,
            attempt=grant.attempt,
            datasets=[],
            s3=prefixes,
        )

    def _sign(self, claims: Claims, kid: str) -> str:
        payload = msgspec.json.encode(claims)
        return _jws.encode(payload, self._keyring.private(kid), algorithm=ALGORITHM, headers={"kid": kid})

    async def _issue_by_reference(self, claims: Claims, kid: str) -> str:
        async with self._database.connection() as connection:
            capability_id = await _sql.insert_capability(
                connection,
                task_id=claims.task_id,
                attempt=claims.attempt,
                grants=msgspec.json.encode({"datasets": claims.datasets, "s3": claims.s3}).decode(),
                seconds=2 * self._ttl,
            )
        small = msgspec.structs.replace(claims, datasets=[], s3=Prefixes([], []), capability_id=capability_id)
        return self._sign(small, kid)

    async def _verify_anew(self, token: str) -> tuple[str, Claims]:
        if len(token) > MAX_PRESENTED_BYTES or not _COMPACT.fullmatch(token):
            raise _refused()
        kid = _kid_of(token)
        key = await self._keyring.public(kid)
        if key is None:
            raise _refused()
        claims = _checked(_decode(token, key), self._issuer, self._clock.now().timestamp())
        return kid, claims if claims.capability_id is None else await self._resolved(claims)

    async def _resolved(self, claims: Claims) -> Claims:
        async with self._database.connection() as connection:
            row = await _sql.find_capability(connection, capability_id=claims.capability_id)
        if row is None or row["task_id"] != claims.task_id or row["attempt"] != claims.attempt:
            raise _refused()
        grants = msgspec.json.decode(row["grants"])
        return msgspec.structs.replace(claims, datasets=grants["datasets"], s3=msgspec.convert(grants["s3"], Prefixes))


def _dataset_claim(granted: TaskInput) -> dict[str, Any]:
    claim: dict[str, Any] = {
        "dataset_uuid": str(granted.dataset_uuid),
        "dataset_version": str(granted.dataset_version),
    }
    return claim | {"storage_ref": _storage_ref(granted.read_prefix)} if granted.storage == _FILES else claim


def _storage_ref(url: str) -> dict[str, str]:
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return {"scheme": scheme, "prefix": rest, "glob": _GLOB}
    bucket, _, prefix = rest.partition("/")
    return {"scheme": scheme, "bucket": bucket, "prefix": prefix, "glob": _GLOB}


def require_binding(claims: Claims, task_id: UUID, attempt: int) -> None:
    """Body and token must name the same attempt of the same task."""
    if claims.task_id != task_id or claims.attempt != attempt:
        raise Forbidden("The capability token is for another task or attempt.", code="token_mismatch")


def _kid_of(token: str) -> str:
    try:
        header = _jws.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _refused() from None
    kid = header.get("kid")
    # The algorithm is ours to choose, not the token's: no `none`, no HS256 keyed with a public key. Nothing else in
    # there means anything to us: no key that the token brings along, no address of one, no extension.
    if not isinstance(kid, str) or header != {"alg": ALGORITHM, "typ": "JWT", "kid": kid}:
        raise _refused()
    return kid


def _decode(token: str, key: ec.EllipticCurvePublicKey) -> dict[str, Any]:
    try:
        payload = _jws.decode_complete(token, key, algorithms=[ALGORITHM])["payload"].decode()
        claims: dict[str, Any] = json.loads(payload, object_pairs_hook=_once_each)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _refused() from None
    return claims


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A claim that is there twice says two things; which one counts would depend on the reader."""
    claims = dict(pairs)
    if len(claims) != len(pairs):
        raise ValueError
    return claims


def _checked(payload: dict[str, Any], issuer: str, now: float) -> Claims:
    try:
        claims = msgspec.convert(payload, Claims, strict=True)
    except msgspec.ValidationError:
        raise _refused() from None
    good = (
        claims.iss == issuer
        and claims.aud == AUDIENCE
        and claims.sub == f"task:{claims.task_id}"
        and claims.iat <= now + _SKEW_SECONDS
        and claims.iat < claims.exp
    )
    if not good:
        raise _refused()
    return claims


def _refused() -> Unauthenticated:
    return Unauthenticated("The capability token does not verify.", code="bad_token")
