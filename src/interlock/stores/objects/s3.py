"""Objects in a bucket of S3 or of an S3-compatible store, and short-lived AWS credentials through STS AssumeRole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, S3Store

from interlock.errors import InterlockError, TooLarge, Unavailable
from interlock.stores.objects.port import (
    Found,
    Method,
    Objects,
    already_exists,
    as_object,
    as_prefix,
    require_lifetime,
    too_large,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta


SCHEME: Final = "s3://"
_AT_ONCE: Final = 1000


class S3Objects(Objects):
    """Uses the credentials of the machine or environment. Lifecycle rules of the bucket remove incomplete uploads."""

    def __init__(self, root: str, *, endpoint: str | None = None, region: str | None = None) -> None:
        super().__init__(root)
        self._endpoint, self._region = endpoint, region
        self._store: S3Store | None = None

    async def read(self, uri: str, limit: int | None = None) -> bytes | None:
        try:
            with _store_errors():
                found = await obstore.get_async(self._opened(), as_object(self.key(uri)))
                if limit is not None and found.meta["size"] > limit:
                    raise too_large(limit)
                return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None

    async def read_range(self, uri: str, start: int, length: int) -> bytes | None:
        key = as_object(self.key(uri))
        try:
            with _store_errors():
                # A range after the last byte is an error in the store, and empty here.
                size = (await obstore.head_async(self._opened(), key))["size"]
                end = min(start + length, size)
                if start >= end:
                    return b""
                return bytes(await obstore.get_range_async(self._opened(), key, start=start, end=end))
        except FileNotFoundError:
            return None

    async def read_to(self, uri: str, path: Path, limit: int) -> Found | None:
        try:
            with _store_errors():
                got = await obstore.get_async(self._opened(), as_object(self.key(uri)))
                if got.meta["size"] > limit:
                    raise too_large(limit)
                with path.open("wb") as copy:
                    async for chunk in got.stream():
                        await asyncio.to_thread(copy.write, chunk)
                return self._found(got.meta)
        except FileNotFoundError:
            return None

    async def head(self, uri: str) -> Found | None:
        try:
            with _store_errors():
                return self._found(await obstore.head_async(self._opened(), as_object(self.key(uri))))
        except FileNotFoundError:
            return None

    async def write(
        self, uri: str, chunks: AsyncIterator[bytes], *, limit: int | None = None, create: bool = False
    ) -> Found:
        source = _Bounded(chunks, limit)
        key = as_object(self.key(uri))
        with _store_errors(source):
            if create:
                data = b"".join([chunk async for chunk in source.chunks()])
                await obstore.put_async(self._opened(), key, data, mode="create", use_multipart=False)
            else:
                await obstore.put_async(self._opened(), key, source.chunks())
        return await self._written(uri)

    async def put(self, uri: str, data: bytes, *, create: bool = False) -> Found:
        mode: Any = "create" if create else "overwrite"
        with _store_errors():
            await obstore.put_async(self._opened(), as_object(self.key(uri)), data, mode=mode, use_multipart=False)
        return await self._written(uri)

    async def list_under(self, prefix: str) -> AsyncIterator[Found]:
        key = "" if prefix == f"{self.root}/" else as_prefix(self.key(prefix))
        with _store_errors():
            async for page in obstore.list(self._opened(), key, chunk_size=_AT_ONCE):
                for meta in page:
                    yield self._found(meta)

    async def delete(self, uri: str) -> None:
        try:
            with _store_errors():
                await obstore.delete_async(self._opened(), as_object(self.key(uri)))
        except FileNotFoundError:
            return

    async def delete_under(self, prefix: str) -> int:
        deleted = 0
        with _store_errors():
            async for page in obstore.list(self._opened(), as_prefix(self.key(prefix)), chunk_size=_AT_ONCE):
                await obstore.delete_async(self._opened(), [meta["path"] for meta in page])
                deleted += len(page)
        return deleted

    async def sign(self, method: Method, uri: str, seconds: float) -> str:
        require_lifetime(seconds)
        with _store_errors():
            return await obstore.sign_async(
                self._opened(), method, as_object(self.key(uri)), timedelta(seconds=seconds)
            )

    async def sweep_uploads(self, before: datetime) -> int:  # noqa: ARG002 - S3 handles this by lifecycle rules
        return 0

    async def _written(self, uri: str) -> Found:
        written = await self.head(uri)
        if written is None:
            raise Unavailable("The object was removed while it was written; write it again.")
        return written

    def _found(self, meta: ObjectMeta) -> Found:
        return Found(self.uri(meta["path"]), meta["size"], (meta["e_tag"] or "").strip('"'), meta["last_modified"])

    def _opened(self) -> S3Store:
        if self._store is None:
            self._store = open_bucket(self.root, endpoint=self._endpoint, region=self._region)
        return self._store


class _Bounded:
    """Limits the size of a stream. Keeps its error, which the store would otherwise wrap in its own."""

    def __init__(self, chunks: AsyncIterator[bytes], limit: int | None) -> None:
        self._chunks, self._most = chunks, limit
        self.error: BaseException | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._chunks:
                size += len(chunk)
                if self._most is not None and size > self._most:
                    raise too_large(self._most)
                yield chunk
        except BaseException as error:
            self.error = error
            raise


def open_bucket(root: str, *, endpoint: str | None = None, region: str | None = None) -> S3Store:
    """Opens a bucket. Without an endpoint or a region, the usual AWS_… variables apply."""
    options: dict[str, Any] = {}
    if endpoint is not None:
        # An S3-compatible store has no host name per bucket.
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        options["client_options"] = {"allow_http": endpoint.startswith("http://")}
    if region is not None:
        options["region"] = region
    return S3Store.from_url(root, **options)


def open_store(root: str, *, endpoint: str | None = None, region: str | None = None) -> ObjectStore:
    """Returns the obstore store of a root."""
    if root.startswith(SCHEME):
        return open_bucket(root, endpoint=endpoint, region=region)
    return LocalStore(Path(root.removeprefix("file://")), automatic_cleanup=True, mkdir=True)


@contextmanager
def _store_errors(source: _Bounded | None = None) -> Iterator[None]:
    try:
        yield
    except InterlockError:
        raise
    except (AlreadyExistsError, FileExistsError):
        raise already_exists() from None
    except (NotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(type(error).__name__) from None
    except Exception as error:
        if source is not None and source.error is not None:
            raise source.error from None
        if not isinstance(error, BaseError | OSError):
            raise
        raise Unavailable(
            f"The object store does not respond ({type(error).__name__}): check objects_url and its credentials."
        ) from error


SHORTEST_SECONDS: Final = 900
LONGEST_SECONDS: Final = 3600
"""Limits of STS, and the default maximum of a role."""
_CONNECT_SECONDS: Final = 3
_READ_SECONDS: Final = 10


@dataclass(frozen=True)
class AssumedRole:
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime


class Sts:
    """Uses the default AWS credential chain: environment, profile, or the role of the machine."""

    def __init__(self, role_arn: str, *, endpoint: str | None, region: str | None) -> None:
        self._role_arn = role_arn
        self._endpoint = endpoint
        self._region = region
        self._open = AsyncExitStack()
        self._opening = asyncio.Lock()
        # aioboto3 generates clients at run time, so they have no static types.
        self._client: Any = None

    async def assume(self, session: str, policy: str, seconds: int) -> AssumedRole:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - as below

        try:
            reply = await (await self._connected()).assume_role(
                RoleArn=self._role_arn,
                RoleSessionName=session,
                Policy=policy,
                DurationSeconds=max(SHORTEST_SECONDS, min(seconds, LONGEST_SECONDS)),
            )
        except ClientError as error:
            raise _refused(error.response.get("Error", {}).get("Code", "")) from error
        except (BotoCoreError, OSError) as error:
            raise _refused(type(error).__name__) from error
        given = reply["Credentials"]
        return AssumedRole(given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"], given["Expiration"])

    async def _connected(self) -> Any:
        """Returns the client of this process. Creating a client takes far longer than a request."""
        async with self._opening:
            if self._client is None:
                import aioboto3  # noqa: PLC0415 - slow import, needed only with a role to assume
                from botocore.config import Config  # noqa: PLC0415

                config = Config(
                    connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries={"total_max_attempts": 2}
                )
                made = aioboto3.Session().client(
                    "sts", endpoint_url=self._endpoint, region_name=self._region, config=config
                )
                self._client = await self._open.enter_async_context(made)
        return self._client

    async def close(self) -> None:
        await self._open.aclose()


def _refused(why: str) -> TooLarge | Unavailable:
    if why == "PackedPolicyTooLarge":
        return TooLarge(
            "The session policy of this task is too large for STS. Reduce the inputs and outputs of the job, or "
            "shorten the prefix in objects_url.",
            code="policy_too_large",
        )
    return Unavailable(
        f"STS issued no credentials ({why}): check credentials_role_arn, sts_endpoint, and that the role trusts this "
        "dispatcher.",
        code="sts_unavailable",
    )
