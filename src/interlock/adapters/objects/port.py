"""The port: files of datasets, batches, bundles and results, by their full URI.

{root}/dataset/{dataset_uuid}/version/{dataset_version}/_attempts/{task_id}/{attempt}/…
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from interlock.adapters.objects.keys import leads_elsewhere
from interlock.errors import BadRequest, PreconditionFailed, TooLarge

Method = Literal["GET", "HEAD", "PUT", "POST", "DELETE"]
LONGEST_SECONDS: Final = 7 * 24 * 3600
"""What S3 lets a presigned URL live at most; the gateway's own live no longer."""


@dataclass(frozen=True)
class Found:
    """What is known of an object without reading it. `etag` changes with the content and means nothing else."""

    uri: str
    size: int
    etag: str
    modified_at: datetime


SignUrl = Callable[[str, str, float], Awaitable[str]]
"""Method, key and seconds, to the URL under which the gateway serves a directory."""


class Objects(ABC):
    """What lies under one root. A URI outside of it is a mistake of the caller's."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")

    def key(self, uri: str) -> str:
        """Of an object, or of a prefix, which ends with a slash."""
        key = uri[len(self.root) + 1 :]
        if not uri.startswith(f"{self.root}/") or leads_elsewhere(key.removesuffix("/")):
            raise ValueError(f"{uri} does not lie under {self.root}")
        return key

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"

    @abstractmethod
    async def read(self, uri: str, most: int | None = None) -> bytes | None:
        """None when there is no such object; TooLarge past `most` bytes, before the first one."""

    @abstractmethod
    async def read_range(self, uri: str, start: int, length: int) -> bytes | None:
        """`length` bytes from `start` on; fewer where the object ends before. None when there is no such object."""

    @abstractmethod
    async def read_to(self, uri: str, path: Path, most: int) -> Found | None:
        """Downloads to a file. None when there is no such object; TooLarge past `most` bytes, before the first one."""

    @abstractmethod
    async def head(self, uri: str) -> Found | None: ...

    @abstractmethod
    async def write(
        self, uri: str, chunks: AsyncIterator[bytes], *, most: int | None = None, create: bool = False
    ) -> Found:
        """Streams; the object appears whole or not at all, in place of one that was there.

        `create` raises PreconditionFailed instead when there is one. TooLarge past `most` bytes.
        """

    async def put(self, uri: str, data: bytes, *, create: bool = False) -> Found:
        async def whole() -> AsyncIterator[bytes]:
            yield data

        return await self.write(uri, whole(), create=create)

    @abstractmethod
    def list_under(self, prefix: str) -> AsyncIterator[Found]:
        """`prefix` ends with a slash; that of the root is one, too."""

    @abstractmethod
    async def delete(self, uri: str) -> None:
        """Harmless when it is gone already."""

    @abstractmethod
    async def delete_under(self, prefix: str) -> int:
        """How many objects there were. `prefix` ends with a slash, so that it is not the beginning of another name."""

    @abstractmethod
    async def sign(self, method: Method, uri: str, seconds: float) -> str:
        """A URL by which whoever holds it may do this one thing, until it expires."""

    @abstractmethod
    async def sweep_uploads(self, before: datetime) -> int:
        """Removes what was being uploaded before then and never finished; how many uploads there were."""


def as_prefix(key: str) -> str:
    if not key.endswith("/"):
        raise ValueError(f"{key} is no prefix: it must end with a slash")
    return key


def as_object(key: str) -> str:
    if key.endswith("/"):
        raise ValueError(f"{key} is a prefix, and no object")
    return key


def require_lifetime(seconds: float) -> None:
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise BadRequest(f"A signed URL lives between 1 and {LONGEST_SECONDS} seconds.", code="bad_lifetime")


def too_large(most: int) -> TooLarge:
    return TooLarge(f"The object has more than {most} bytes.", code="object_too_large")


def there_already() -> PreconditionFailed:
    return PreconditionFailed("There is an object of this key already.", code="object_exists")
