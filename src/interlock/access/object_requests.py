"""Parsing of requests for objects: key, part of an upload, byte range and conditions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from litestar.connection import ASGIConnection

from interlock.access.object_tokens import Method
from interlock.access.signed_urls import PATH
from interlock.errors import BadRequest, NotFound, RangeNotSatisfiable
from interlock.stores.objects import DirectoryObjects, Found, Objects, canonical_key, canonical_prefix

# The canonical spelling of a path encodes none of these. A proxy in front might interpret encoded ones differently.
_ENCODED: Final = re.compile(r"%(?:2e|2f|5c|25|00)", re.IGNORECASE)
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_UNSUPPORTED_HEADERS: Final = ("content-range", "if-match", "if-unmodified-since", "if-modified-since")


Connection = ASGIConnection[Any, Any, Any, Any]
Query = list[tuple[str, str]]


@dataclass(frozen=True)
class AskedObject:
    objects: DirectoryObjects
    method: Method
    key: str
    """Key of an object, or a prefix that ends with a slash."""
    query: Query

    @property
    def uri(self) -> str:
        return self.objects.uri(self.key)

    @cached_property
    def _named(self) -> dict[str, str]:
        named = dict(self.query)
        if len(named) != len(self.query):
            raise BadRequest("A query parameter occurs twice; send it once.", code="invalid_request")
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
            raise BadRequest(f"partNumber must be from 1 to 10000, got {number[:20]!r}.", code="bad_part")
        return int(number)


def query_of(connection: Connection) -> Query:
    """Returns the query parameters as received, including repeated ones."""
    return parse_qsl(connection.scope["query_string"].decode("ascii", errors="replace"), keep_blank_values=True)


def asked_object(connection: Connection, objects: Objects, query: Query) -> AskedObject:
    """Parses the raw path, because in the decoded path an encoded slash is indistinguishable from a real one."""
    path = connection.scope["raw_path"].decode("ascii", errors="replace")
    if path == PATH:
        prefix = next((value for name, value in query if name == "prefix"), "")
        return AskedObject(_directory(objects), "LIST", canonical_prefix(prefix), query)
    if _ENCODED.search(path):
        raise BadRequest(
            "Invalid object key: dots, slashes, backslashes and percent signs must not be percent-encoded.",
            code="bad_object_key",
        )
    method: Any = connection.scope["method"]  # type: ignore[typeddict-item]
    return AskedObject(_directory(objects), method, canonical_key(unquote(path.removeprefix(f"{PATH}/"))), query)


def _directory(objects: Objects) -> DirectoryObjects:
    if isinstance(objects, DirectoryObjects):
        return objects
    raise NotFound(
        "This installation stores objects in S3; use a presigned URL, or the credentials from "
        "POST /v1/task/credentials.",
        code="objects_elsewhere",
    )


@dataclass(frozen=True)
class Slice:
    start: int
    length: int


def wanted_slice(header: str | None, if_range: str | None, found: Found) -> Slice | None:
    """Returns the requested range, or None for the whole object, also for several ranges or an outdated `If-Range`."""
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
    """Returns True if a PUT must only create. Rejects conditions that are not supported instead of ignoring them."""
    for name in _UNSUPPORTED_HEADERS:
        if name in headers:
            raise BadRequest(f"PUT of an object does not support the header {name}; remove it.", code="invalid_request")
    condition = headers.get("if-none-match")
    if condition not in (None, "*"):
        raise BadRequest("PUT of an object supports only `If-None-Match: *`.", code="invalid_request")
    return condition is not None


def quoted(etag: str) -> str:
    return f'"{etag}"'
