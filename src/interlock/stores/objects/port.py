"""The port: files of datasets, batches, bundles and results, by their full URI.

{root}/dataset/{dataset_uuid}/version/{dataset_version}/_attempts/{task_id}/{attempt}/…
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from interlock.errors import BadRequest, PreconditionFailed, TooLarge

Method = Literal["GET", "HEAD", "PUT", "POST", "DELETE"]
LONGEST_SECONDS: Final = 7 * 24 * 3600
"""Maximum lifetime of presigned URLs in S3; URLs of the gateway have the same limit."""


@dataclass(frozen=True)
class Found:
    """Metadata of an object. `etag` changes with the content and has no other meaning."""

    uri: str
    size: int
    etag: str
    modified_at: datetime


SignUrl = Callable[[str, str, float], Awaitable[str]]
"""Maps method, key and seconds to the URL at which the gateway serves a directory."""


class Objects(ABC):
    """The objects under one root. A URI outside the root is a bug of the caller."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")

    def key(self, uri: str) -> str:
        """Returns the key of an object, or of a prefix, which ends with a slash."""
        key = uri[len(self.root) + 1 :]
        if not uri.startswith(f"{self.root}/") or is_outside(key.removesuffix("/")):
            raise ValueError(f"{uri} is not under {self.root}")
        return key

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"

    @abstractmethod
    async def read(self, uri: str, limit: int | None = None) -> bytes | None:
        """Reads an object, or returns None if it does not exist.

        Raises TooLarge over `limit` bytes, before reading any.
        """

    @abstractmethod
    async def read_range(self, uri: str, start: int, length: int) -> bytes | None:
        """Reads `length` bytes from `start`, or fewer at the end of the object. None if the object does not exist."""

    @abstractmethod
    async def read_to(self, uri: str, path: Path, limit: int) -> Found | None:
        """Downloads to a file, or returns None if the object does not exist.

        Raises TooLarge over `limit` bytes, like `read`.
        """

    @abstractmethod
    async def head(self, uri: str) -> Found | None: ...

    @abstractmethod
    async def write(
        self, uri: str, chunks: AsyncIterator[bytes], *, limit: int | None = None, create: bool = False
    ) -> Found:
        """Streams to an object, which is replaced atomically.

        With `create`, raises PreconditionFailed if it exists. Raises TooLarge over `limit` bytes.
        """

    async def put(self, uri: str, data: bytes, *, create: bool = False) -> Found:
        async def whole() -> AsyncIterator[bytes]:
            yield data

        return await self.write(uri, whole(), create=create)

    @abstractmethod
    def list_under(self, prefix: str) -> AsyncIterator[Found]:
        """Lists objects. `prefix` must end with a slash; the root is also a prefix."""

    @abstractmethod
    async def delete(self, uri: str) -> None:
        """Deletes an object. Does nothing if it does not exist."""

    @abstractmethod
    async def delete_under(self, prefix: str) -> int:
        """Deletes all objects under `prefix`, which must end with a slash, and returns their number."""

    @abstractmethod
    async def sign(self, method: Method, uri: str, seconds: float) -> str:
        """Returns a URL that grants its holder this one operation until it expires."""

    @abstractmethod
    async def sweep_uploads(self, before: datetime) -> int:
        """Removes incomplete uploads that were last active before then, and returns their number."""


def as_prefix(key: str) -> str:
    if not key.endswith("/"):
        raise ValueError(f"{key} is not a prefix: it must end with a slash")
    return key


def as_object(key: str) -> str:
    if key.endswith("/"):
        raise ValueError(f"{key} is a prefix, not an object")
    return key


def require_lifetime(seconds: float) -> None:
    if not 1 <= seconds <= LONGEST_SECONDS:
        raise BadRequest(
            f"The lifetime of a signed URL must be from 1 to {LONGEST_SECONDS} seconds, got {seconds:g}.",
            code="bad_lifetime",
        )


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"The object exceeds the limit of {limit} bytes.", code="object_too_large")


def already_exists() -> PreconditionFailed:
    return PreconditionFailed("An object with this key already exists.", code="object_exists")


UPLOADS: Final = "_uploads"
"""The folder below the root of a directory for incomplete uploads. No key can name it."""
_MAX_BYTES: Final = 1024
_MAX_SEGMENT_BYTES: Final = 255
_ESCAPES: Final = frozenset("\\%\N{REPLACEMENT CHARACTER}")
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_ELSEWHERE: Final = frozenset({"", ".", ".."})


def is_outside(key: str) -> bool:
    """Returns True if the key names nothing below the root, or the reserved uploads folder."""
    segments = key.split("/")
    return segments[0] == UPLOADS or "\0" in key or any(segment in _ELSEWHERE for segment in segments)


def canonical_key(key: str) -> str:
    """Returns the key if it is in canonical spelling. Raises BadRequest."""
    problem = _problem(key)
    if problem is not None:
        raise BadRequest(f"Invalid object key: {problem}.", code="bad_object_key")
    return key


def canonical_prefix(prefix: str) -> str:
    """Returns a prefix, which is a key with a trailing slash, so that `a/b` never matches `a/bc`. Raises BadRequest."""
    if not prefix.endswith("/"):
        raise BadRequest("An object prefix must end with a slash.", code="bad_object_key")
    canonical_key(prefix[:-1])
    return prefix


def _problem(key: str) -> str | None:
    if any(character in _ESCAPES or unicodedata.category(character) in _UNSEEN for character in key):
        return "it has a backslash, a percent sign or an invisible character"
    if not 0 < len(key.encode()) <= _MAX_BYTES:
        return f"it must have from 1 to {_MAX_BYTES} bytes"
    if any(len(segment.encode()) > _MAX_SEGMENT_BYTES for segment in key.split("/")):
        return f"each path component must have at most {_MAX_SEGMENT_BYTES} bytes"
    if unicodedata.normalize("NFC", key) != key:
        return "it must be in Unicode normal form NFC"
    # Characters that some reader may interpret as a dot or a slash are rejected like the real ones.
    folded = unicodedata.normalize("NFKC", key)
    if folded.count("/") != key.count("/") or "\\" in folded or is_outside(folded):
        return f"a segment is empty, is or looks like `.` or `..`, or the first one is {UPLOADS}"
    return None
