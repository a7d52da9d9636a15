"""Endpoints for objects in a directory, for holders of signed URLs or object tokens.

With S3, clients use the bucket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from litestar import HttpMethod, Response, delete, get, post, put, route
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, Parameter, Reference, RequestBody, Schema
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from interlock.access.guards import asked_of, grant_of, object_guard, require_grant_still
from interlock.access.object_requests import AskedObject, Slice, must_be_new, quoted, wanted_slice
from interlock.errors import BadRequest, NotFound
from interlock.http.problems import documented
from interlock.http.requests import Http, decode, require_json, settings_of
from interlock.stores.objects import DirectoryObjects, Found, OpenObject, canonical_key
from interlock.stores.objects.port import too_large
from interlock.wire.access import ObjectPage, ObjectView, UploadParts, UploadStarted
from interlock.wire.base import MAX_PAGE

_BYTES = "application/octet-stream"
_KEY = "/v1/objects/{key:path}"
_SAFE = {
    # The writer of an object controls its bytes: no browser may render them as a page of the gateway.
    "X-Content-Type-Options": "nosniff",
    "Content-Disposition": "attachment",
    "Cache-Control": "private, no-store",
    "Accept-Ranges": "bytes",
}
_TEXT = Schema(type="string")  # type: ignore[arg-type]


def _optional(*names: str) -> list[Parameter]:
    return [Parameter(name=name, param_in="query", required=False, schema=_TEXT) for name in names]


@dataclass
class _Signed(Operation):
    """Documents the query parameters that the guard reads, which are not parameters of the handler."""

    def __post_init__(self) -> None:
        self.parameters = [*(self.parameters or []), *_optional("expires", "kid", "signature")]


@dataclass
class _OfUpload(_Signed):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters = [*(self.parameters or []), *_optional("uploadId")]


@dataclass
class _Put(_OfUpload):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters = [*(self.parameters or []), *_optional("partNumber")]
        self.request_body = RequestBody(content={_BYTES: OpenAPIMediaType(schema=Schema())}, required=True)


@dataclass
class _Post(_OfUpload):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters = [*(self.parameters or []), *_optional("uploads")]
        parts = OpenAPIMediaType(schema=Reference(ref="#/components/schemas/UploadParts"))
        self.request_body = RequestBody(content={"application/json": parts}, required=False)


@get(
    "/v1/objects",
    guards=[object_guard],
    summary="Objects under a prefix that the object token grants",
    description="In key order. Lists only objects that the attempt may read.",
)
async def list_objects(
    request: Http,
    prefix: Annotated[str, QueryParameter(name="prefix", description="must end with a slash")],
    cursor: Annotated[str | None, QueryParameter(name="cursor", required=False)] = None,
    limit: Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE)] = 100,
) -> ObjectPage:
    asked, grant = asked_of(request), grant_of(request)
    if cursor is not None and not canonical_key(cursor).startswith(prefix):
        raise BadRequest("The cursor belongs to another prefix.", code="bad_cursor")
    page, more = await _page(asked, None if cursor is None else asked.objects.uri(cursor), limit)
    visible = set(await grant.visible([one.uri for one in page]))
    return ObjectPage(
        objects=[_view(asked.objects, one) for one in page if one.uri in visible],
        next_cursor=asked.objects.key(page[-1].uri) if more else None,
    )


async def _page(asked: AskedObject, after: str | None, limit: int) -> tuple[list[Found], bool]:
    page: list[Found] = []
    async for one in asked.objects.list_under(asked.uri, after=after):
        if len(page) == limit:
            return page, True
        page.append(one)
    return page, False


@get(
    _KEY,
    guards=[object_guard],
    operation_class=_Signed,
    responses={
        200: ResponseSpec(bytes, description="The object", media_type=_BYTES, generate_examples=False),
        206: ResponseSpec(bytes, description="The bytes of `Range`", media_type=_BYTES, generate_examples=False),
        416: documented(416),
    },
    summary="An object, or one byte range of it",
    description="HEAD returns the same headers without the bytes; a signed URL is valid for only one of the two "
    "methods.",
)
async def get_object(request: Http, key: FromPath[str]) -> Response[Any]:  # noqa: ARG001 - read from the raw path
    opened = await _opened(asked_of(request))
    found = opened.found
    try:
        part = wanted_slice(request.headers.get("range"), request.headers.get("if-range"), found)
    except BaseException:
        opened.close()
        raise
    whole = part or Slice(0, found.size)
    headers = _headers(found) | {"Content-Length": str(whole.length)}
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.start + part.length - 1}/{found.size}"
    return Stream(
        opened.chunks(whole.start, whole.length),
        status_code=200 if part is None else 206,
        headers=headers,
        media_type=_BYTES,
    )


@route(
    _KEY,
    http_method=[HttpMethod.HEAD],
    guards=[object_guard],
    operation_class=_Signed,
    status_code=200,
    responses={200: ResponseSpec(None, description="The headers of the object", generate_examples=False)},
    summary="Size and ETag of an object",
)
async def head_object(request: Http, key: FromPath[str]) -> Response[bytes]:  # noqa: ARG001 - as above
    asked = asked_of(request)
    found = await asked.objects.head(asked.uri)
    if found is None:
        raise _missing()
    headers = _headers(found) | {"Content-Length": str(found.size)}
    return Response(b"", status_code=200, headers=headers, media_type=_BYTES)


@put(
    _KEY,
    guards=[object_guard],
    operation_class=_Put,
    request_max_body_size=None,
    responses={412: documented(412)},
    summary="Write an object, or a part of one",
    description="The object is replaced atomically; with `If-None-Match: *`, it is only created. With uploadId and "
    "partNumber, the body becomes a part of that upload.",
)
async def put_object(request: Http, key: FromPath[str]) -> Response[ObjectView]:  # noqa: ARG001 - as above
    asked, limit = asked_of(request), settings_of(request).object_limit_bytes
    create = must_be_new(request.headers)
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    if asked.upload_id is None:
        found = await asked.objects.write(asked.uri, _body(request), limit=limit, create=create)
    else:
        found = await asked.objects.uploads.put_part(
            asked.key, asked.upload_id, asked.part_number, _body(request), limit
        )
    return _written(asked, found)


@post(
    _KEY,
    guards=[object_guard],
    operation_class=_Post,
    status_code=200,
    summary="Start a multipart upload (uploads), or complete it (uploadId)",
    description="Name the parts with the ETags that their PUTs returned. Completing is idempotent.",
)
async def post_object(request: Http, key: FromPath[str]) -> UploadStarted | ObjectView:  # noqa: ARG001 - as above
    asked = asked_of(request)
    if asked.upload_id is not None:
        return await _complete(request, asked, asked.upload_id)
    if asked.begins_upload:
        return UploadStarted(key=asked.key, upload_id=await asked.objects.uploads.start(asked.key))
    raise BadRequest(
        "Add `?uploads` to start a multipart upload, or `?uploadId=…` to complete one.", code="invalid_request"
    )


async def _complete(request: Http, asked: AskedObject, upload_id: str) -> ObjectView:
    require_json(request.headers.getall("content-type", []))
    named: UploadParts = decode(await request.body(), UploadParts)
    parts = [(part.part_number, part.etag.strip('"')) for part in named.parts]
    limit = settings_of(request).object_limit_bytes
    await require_grant_still(request)
    return _view(asked.objects, await asked.objects.uploads.complete(asked.key, upload_id, parts, limit))


@delete(
    _KEY,
    guards=[object_guard],
    operation_class=_OfUpload,
    status_code=204,
    summary="Abort a multipart upload",
    description="Objects cannot be deleted here; Interlock deletes them with the data that they belong to.",
)
async def abort_upload(request: Http, key: FromPath[str]) -> None:  # noqa: ARG001 - as above
    asked = asked_of(request)
    if asked.upload_id is None:
        raise BadRequest("Add `?uploadId=…`; objects themselves cannot be deleted here.", code="invalid_request")
    await asked.objects.uploads.abort(asked.key, asked.upload_id)


async def _body(request: Http) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        yield chunk
    await require_grant_still(request)


async def _opened(asked: AskedObject) -> OpenObject:
    opened = await asked.objects.open(asked.uri)
    if opened is None:
        raise _missing()
    return opened


def _headers(found: Found) -> dict[str, str]:
    modified = found.modified_at.strftime("%a, %d %b %Y %H:%M:%S GMT")
    return _SAFE | {"ETag": quoted(found.etag), "Last-Modified": modified}


def _view(objects: DirectoryObjects, found: Found) -> ObjectView:
    return ObjectView(key=objects.key(found.uri), size=found.size, etag=found.etag, modified_at=found.modified_at)


def _written(asked: AskedObject, found: Found) -> Response[ObjectView]:
    return Response(_view(asked.objects, found), status_code=200, headers={"ETag": quoted(found.etag)})


def _missing() -> NotFound:
    return NotFound("This object does not exist.", code="no_such_object")


HANDLERS = [list_objects, get_object, head_object, put_object, post_object, abort_upload]
