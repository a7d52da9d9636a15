"""What a request for an object asks for: which one, which part of an upload, which bytes, on what condition."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from litestar.connection import ASGIConnection

from interlock.access.object_tokens import Method
from interlock.access.signed_urls import PATH
from interlock.adapters.objects import DirectoryObjects, Found, canonical_key, canonical_prefix
from interlock.errors import BadRequest, NotFound, RangeNotSatisfiable
from interlock.wiring import Kernel

# In the one spelling of a path none of these is encoded: a proxy before us may read them otherwise than we do.
_ENCODED: Final = re.compile(r"%(?:2e|2f|5c|25|00)", re.IGNORECASE)
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_UNMEANT: Final = ("content-range", "if-match", "if-unmodified-since", "if-modified-since")


Connection = ASGIConnection[Any, Any, Any, Any]
Query = list[tuple[str, str]]


@dataclass(frozen=True)
class AskedObject:
    objects: DirectoryObjects
    method: Method
    key: str
    """Of an object; or a prefix, which ends with a slash."""
    query: Query

    @property
    def uri(self) -> str:
        return self.objects.uri(self.key)

    @cached_property
    def _named(self) -> dict[str, str]:
        named = dict(self.query)
        if len(named) != len(self.query):
            raise BadRequest("The query names something twice; name it once.", code="invalid_request")
        return named

    @property
    def begins_upload(self) -> bool:
        return "uploads" in self._named

    @property
    def upload_id(self) -> str | None:
        return self._named.get("uploadId")

    @property
    def part_number(self) -> int:
        number = self._named.get("partNumber", "")
        if not re.fullmatch(r"[1-9]\d{0,4}", number):
            raise BadRequest("partNumber is between 1 and 10000.", code="bad_part")
        return int(number)


def query_of(connection: Connection) -> Query:
    """Names and values as they came, those that came twice included."""
    return parse_qsl(connection.scope["query_string"].decode("ascii", errors="replace"), keep_blank_values=True)


def asked_object(connection: Connection, kernel: Kernel, query: Query) -> AskedObject:
    """From the path as it came: a decoded one no longer tells a slash from what was written as one."""
    path = connection.scope["raw_path"].decode("ascii", errors="replace")
    if path == PATH:
        prefix = next((value for name, value in query if name == "prefix"), "")
        return AskedObject(_directory(kernel), "LIST", canonical_prefix(prefix), query)
    if _ENCODED.search(path):
        raise BadRequest(
            "This is no key of an object: dots, slashes, backslashes and percent signs are not encoded in one.",
            code="bad_object_key",
        )
    method: Any = connection.scope["method"]  # type: ignore[typeddict-item]
    return AskedObject(_directory(kernel), method, canonical_key(unquote(path.removeprefix(f"{PATH}/"))), query)


def _directory(kernel: Kernel) -> DirectoryObjects:
    if isinstance(kernel.objects, DirectoryObjects):
        return kernel.objects
    raise NotFound(
        "The objects of this installation are in S3: use a presigned URL, or the credentials of "
        "POST /v1/task/credentials.",
        code="objects_elsewhere",
    )


@dataclass(frozen=True)
class Slice:
    start: int
    length: int


def wanted_slice(header: str | None, if_range: str | None, found: Found) -> Slice | None:
    """None for the whole object: also when several ranges are asked for, or those of another object's state."""
    matched = _RANGE.fullmatch(header or "")
    if matched is None or matched[0] == "bytes=-" or if_range not in (None, quoted(found.etag)):
        return None
    first, last = matched.groups()
    if not first:
        start, end = max(0, found.size - int(last)), found.size - 1
    else:
        start, end = int(first), min(int(last or found.size), found.size - 1)
        if last and int(last) < start:
            return None
    if start > end:
        raise RangeNotSatisfiable(f"The object has {found.size} bytes.", size=found.size)
    return Slice(start, end - start + 1)


def must_be_new(headers: Any) -> bool:
    """Whether a PUT may only create. A condition that would not be kept is refused, not ignored."""
    for name in _UNMEANT:
        if name in headers:
            raise BadRequest(f"A PUT of an object does not take {name}; leave it out.", code="invalid_request")
    condition = headers.get("if-none-match")
    if condition not in (None, "*"):
        raise BadRequest("A PUT of an object takes no If-None-Match but `*`.", code="invalid_request")
    return condition is not None


def quoted(etag: str) -> str:
    return f'"{etag}"'
