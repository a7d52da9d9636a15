"""Bundles of user code over HTTP: upload, list, show, delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from litestar import Request, delete, get, post
from litestar.datastructures import State
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.params import FromPath, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.api.problems import WITH_A_BODY
from interlock.errors import UnsupportedMediaType
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import BundlePage, BundleView

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None,
    QueryParameter(name="cursor", required=False, max_length=200, description="next_cursor of the last page"),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]

_ZIP: Final = ("application/zip", "application/octet-stream")


@dataclass
class _TakesAZip(Operation):
    """The body is streamed: Litestar does not know that there is one."""

    def __post_init__(self) -> None:
        content = OpenAPIMediaType(schema=Schema(type="string", format="binary"))  # type: ignore[arg-type]
        self.request_body = RequestBody(required=True, content={"application/zip": content})


@post(
    "/v1/bundles",
    guards=[user_guard],
    opt={"scope": "bundles:write"},
    summary="Upload a zip of user code",
    description="The same content again is the same bundle. A name moves to the bundle that was last uploaded with it.",
    operation_class=_TakesAZip,
    responses=WITH_A_BODY,
    request_max_body_size=None,  # The limit is that of bundles, which is counted while they come in.
)
async def upload_bundle(
    request: Http,
    name: Annotated[
        str | None,
        QueryParameter(name="name", required=False, max_length=100, description="what jobs may call it by"),
    ] = None,
) -> BundleView:
    types = {value.partition(";")[0].strip().lower() for value in request.headers.getall("content-type", [])}
    if not types <= set(_ZIP):
        raise UnsupportedMediaType("A bundle is sent as `application/zip`.")
    principal = principal_of(request)
    return await kernel_of(request).bundles.upload(request.stream(), principal.org_id, principal.user, name)


@get("/v1/bundles", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Bundles, by digest")
async def list_bundles(request: Http, cursor: Cursor = None, limit: Limit = 100) -> BundlePage:
    return await kernel_of(request).bundles.page(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/bundles/{bundle:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A bundle, by name or by the beginning of its digest",
)
async def get_bundle(request: Http, bundle: FromPath[str]) -> BundleView:
    return await kernel_of(request).bundles.bundle(bundle, principal_of(request).org_id)


@delete(
    "/v1/bundles/{bundle:str}",
    guards=[user_guard],
    opt={"scope": "bundles:write"},
    status_code=200,
    summary="Delete a bundle that no job uses",
)
async def delete_bundle(request: Http, bundle: FromPath[str]) -> BundleView:
    return await kernel_of(request).bundles.delete(bundle, principal_of(request).org_id)


HANDLERS = [upload_bundle, list_bundles, get_bundle, delete_bundle]
