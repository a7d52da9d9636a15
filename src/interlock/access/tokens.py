"""Capability tokens: ES256 JWTs (in development HS256) with the read and write permissions of one attempt of one task.

Anything missing, malformed, unknown or inconsistent is rejected. The error reveals nothing about the task.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar
from uuid import UUID, uuid4

import msgspec
from msgspec import Meta, Struct

from interlock.access import jwt
from interlock.access.jwt import MAX_TOKEN_BYTES, PublicKeys, SharedSecret, SigningKeys
from interlock.clock import Clock
from interlock.errors import Forbidden, Unauthenticated
from interlock.stores.postgres import Database, queries
from interlock.wire.attempts import TaskInput, WriteGrant
from interlock.wire.base import Attempt
from interlock.wire.jobs import DatasetRef

AUDIENCE: Final = "trace.task"
_CACHED: Final = 10_000
_SKEW_SECONDS: Final = 60
_FILES: Final = "parquet"
"""The storage that is read as files. For others, a token names only the dataset."""
Glob = Literal["*.parquet", "**/*.parquet"]
_GLOB: Final[Glob] = "*.parquet"
"""Matches no file of an attempt (`_attempts/…`), because only the registry knows which of those are committed. The
other pattern is for older tokens, issued before this rule, that have not expired yet."""

_sql = queries(__name__, "principals")

Time = Annotated[int, Meta(ge=0, le=2**53)]


class Prefixes(Struct, frozen=True, forbid_unknown_fields=True):
    read_prefixes: list[str]
    write_prefixes: list[str]


class StorageRef(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    scheme: Literal["s3", "file"]
    prefix: Annotated[str, Meta(min_length=1)]
    glob: Glob
    bucket: Annotated[str, Meta(min_length=1)] | None = None

    @property
    def url(self) -> str:
        return (
            f"{self.scheme}://{self.prefix}" if self.bucket is None else f"{self.scheme}://{self.bucket}/{self.prefix}"
        )


class DatasetClaim(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A dataset version that the attempt may read; with `storage_ref`, as files."""

    dataset_uuid: UUID
    dataset_version: UUID
    storage_ref: StorageRef | None = None


class Claims(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Claims with the field names of the wire. Types are strict: `attempt: "1"` or an additional claim is rejected."""

    iss: str
    aud: str
    sub: str
    exp: Time
    iat: Time
    jti: str
    org_id: UUID
    task_id: UUID
    attempt: Attempt
    datasets: list[DatasetClaim]
    s3: Prefixes
    capability_id: UUID | None = None


class Kept(Struct, frozen=True):
    """The grants of a token over the size limit, stored in Postgres."""

    datasets: list[DatasetClaim]
    s3: Prefixes


_kept = msgspec.json.Decoder(Kept)


@dataclass(frozen=True)
class Grant:
    """The input for a token."""

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
    """Returns the write prefixes of the attempt. Only it writes there, and only committed files are read."""
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


class CapabilityVerifier:
    """Verifies capability tokens with public keys only, for processes that do not sign."""

    def __init__(
        self, database: Database, keys: PublicKeys, clock: Clock, *, issuer: str, secret: SharedSecret | None = None
    ) -> None:
        self._database = database
        self._public_keys = keys
        self._secret = secret
        """If None, only ES256 is accepted."""
        self._clock = clock
        self._issuer = issuer
        self._verified: OrderedDict[str, tuple[str, Claims]] = OrderedDict()

    async def verify(self, token: str) -> Claims:
        known = self._verified.get(token)
        if known is None:
            known = self._verified[token] = await self._verify_uncached(token)
            if len(self._verified) > _CACHED:
                self._verified.popitem(last=False)
        kid, claims = known
        if not self._is_secrets(kid) and await self._public_keys.public(kid) is None:
            raise _refused()
        if claims.exp <= self._clock.now().timestamp():
            raise Unauthenticated(
                "The capability token has expired; heartbeats renew it in time.", code="token_expired"
            )
        return claims

    def _is_secrets(self, kid: str) -> bool:
        return self._secret is not None and kid == self._secret.kid

    async def _verify_uncached(self, token: str) -> tuple[str, Claims]:
        kid, payload = await self._signed(token)
        if kid is None or payload is None:
            raise _refused()
        claims = _checked(payload, self._issuer, self._clock.now().timestamp())
        return kid, claims if claims.capability_id is None else await self._resolved(claims)

    async def _signed(self, token: str) -> tuple[str | None, dict[str, Any] | None]:
        """Returns the id of the signing key and the claims. The key determines the algorithm, never the token."""
        if self._secret is not None and (payload := jwt.payload_of_secret(token, self._secret)) is not None:
            return self._secret.kid, payload
        kid = jwt.kid_of(token)
        key = await self._public_keys.public(kid) if kid is not None else None
        return kid, jwt.payload_of(token, key) if key is not None else None

    async def _resolved(self, claims: Claims) -> Claims:
        kept = await kept_capability(self._database, claims.capability_id, claims.task_id, claims.attempt)
        if kept is None or not _names_granted(kept.datasets, kept.s3):
            raise _refused()
        return msgspec.structs.replace(claims, datasets=kept.datasets, s3=kept.s3)


class CapabilityTokens(CapabilityVerifier):
    def __init__(
        self,
        database: Database,
        keyring: SigningKeys,
        clock: Clock,
        *,
        issuer: str,
        ttl_seconds: float,
        secret: SharedSecret | None = None,
    ) -> None:
        super().__init__(database, keyring, clock, issuer=issuer, secret=secret)
        self._keyring = keyring
        self._ttl = ttl_seconds

    async def require_signing(self) -> None:
        """Checks that signing works. A claim that fails to sign its tokens would cost every task an attempt."""
        await self._keyring.require_signing()

    async def issue(self, grants: Sequence[Grant], kid: str) -> list[str]:
        """Issues tokens: concurrently if signing needs the network, otherwise sequentially, which is faster."""
        if len(grants) > 1 and await self._keyring.signs_elsewhere(kid):
            return await asyncio.gather(*(self._issue(grant, kid) for grant in grants))
        return [await self._issue(grant, kid) for grant in grants]

    async def _issue(self, grant: Grant, kid: str) -> str:
        prefixes = [prefix for output in grant.outputs for prefix in (output.write_prefix, output.buffer_prefix)]
        # A dataset with two conditions is one grant: a condition restricts what is read, not what may be read.
        read = {each.dataset_version: each for each in grant.inputs}.values()
        files = [each.read_prefix for each in read if each.storage == _FILES]
        claims = self._claims(grant, Prefixes(read_prefixes=files, write_prefixes=prefixes))
        claims = msgspec.structs.replace(claims, datasets=[_dataset_claim(each) for each in read])
        token = await self._sign(claims, kid)
        if len(token) <= MAX_TOKEN_BYTES:
            return token
        return await self._issue_by_reference(claims, kid)

    async def renewed_if_due(self, claims: Claims, active_kid: Callable[[], Awaitable[str]]) -> str | None:
        """Returns a new token for the same capability if at most a third of the lifetime is left, otherwise None."""
        if claims.exp - self._clock.now().timestamp() > self._ttl / 3:
            return None
        if claims.capability_id is not None:
            async with self._database.connection() as connection:
                await _sql.renew_capability(connection, capability_id=claims.capability_id, seconds=2 * self._ttl)
            claims = msgspec.structs.replace(claims, s3=Prefixes([], []), datasets=[])
        now = int(self._clock.now().timestamp())
        fresh = msgspec.structs.replace(claims, iat=now, exp=now + int(self._ttl), jti=str(uuid4()))
        return await self._sign(fresh, await active_kid())

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

    async def _sign(self, claims: Claims, kid: str) -> str:
        payload = msgspec.json.encode(claims)
        if self._secret is not None:
            return jwt.signed_with_secret(payload, self._secret)
        return await jwt.signed(payload, kid, self._keyring)

    async def _issue_by_reference(self, claims: Claims, kid: str) -> str:
        async with self._database.connection() as connection:
            capability_id = await _sql.insert_capability(
                connection,
                task_id=claims.task_id,
                attempt=claims.attempt,
                grants=msgspec.json.encode(Kept(claims.datasets, claims.s3)).decode(),
                seconds=2 * self._ttl,
            )
        small = msgspec.structs.replace(claims, datasets=[], s3=Prefixes([], []), capability_id=capability_id)
        return await self._sign(small, kid)


async def kept_capability(database: Database, capability_id: UUID | None, task_id: UUID, attempt: int) -> Kept | None:
    """Returns the grants behind a `capability_id` if it belongs to this attempt, otherwise None."""
    async with database.connection() as connection:
        row = await _sql.find_capability(connection, capability_id=capability_id)
    if row is None or row["task_id"] != task_id or row["attempt"] != attempt:
        return None
    return _kept.decode(row["grants"])


def _dataset_claim(granted: TaskInput) -> DatasetClaim:
    ref = _storage_ref(granted.read_prefix) if granted.storage == _FILES else None
    return DatasetClaim(granted.dataset_uuid, granted.dataset_version, ref)


def _storage_ref(url: str) -> StorageRef:
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return StorageRef("file", rest, _GLOB)
    bucket, _, prefix = rest.partition("/")
    return StorageRef("s3", prefix, _GLOB, bucket)


def require_binding(claims: Claims, task_id: UUID, attempt: int) -> None:
    """Checks that body and token name the same attempt of the same task."""
    if claims.task_id != task_id or claims.attempt != attempt:
        raise Forbidden("The capability token belongs to another task or attempt.", code="token_mismatch")


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
        and _names_granted(claims.datasets, claims.s3)
    )
    if not good:
        raise _refused()
    return claims


def _names_granted(datasets: Sequence[DatasetClaim], prefixes: Prefixes) -> bool:
    """Returns True if the token grants every location that a dataset names."""
    places = [each.storage_ref for each in datasets if each.storage_ref is not None]
    granted = set(prefixes.read_prefixes)
    return all((ref.scheme == "s3") == (ref.bucket is not None) and ref.url in granted for ref in places)


def _refused() -> Unauthenticated:
    return Unauthenticated("The capability token is invalid.", code="bad_token")


T = TypeVar("T")

SMALL_SHARD: Final = 0
"""Tasks of DAGs and of small runs; a large run gets its own shard."""
_LAST_SHARD: Final = 2**31 - 1
# Uses bits, because the properties of UUID are Python code and this runs for every task of every batch.
_VERSION_AND_VARIANT: Final = 0xF << 76 | 0x3 << 62
_OF_A_SHARD: Final = 8 << 76 | 2 << 62


def shard_of(lease_token: UUID) -> int:
    """Returns the shard; same as interlock.shard_of in SQL. A forged token only names a shard without its task."""
    bits = lease_token.int
    if bits & _VERSION_AND_VARIANT != _OF_A_SHARD:
        return SMALL_SHARD
    shard = bits >> 96
    return shard if shard <= _LAST_SHARD else SMALL_SHARD


def by_shard(items: Iterable[T], lease: Callable[[T], UUID]) -> dict[int, list[T]]:
    """Groups a batch by shard; most batches have only one."""
    groups: defaultdict[int, list[T]] = defaultdict(list)
    for item in items:
        groups[shard_of(lease(item))].append(item)
    return groups
