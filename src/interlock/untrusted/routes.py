"""Endpoints of the gateway for bundles of user code: upload, list, show, delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from litestar import delete, get, post
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.params import FromPath, QueryParameter

from interlock.access.guards import principal_of, user_guard
from interlock.errors import UnsupportedMediaType
from interlock.http.problems import WITH_A_BODY
from interlock.http.requests import Cursor, Http, Limit
from interlock.untrusted.build import untrusted_of
from interlock.wire.bundles import BundlePage, BundleView

_ZIP: Final = ("application/zip", "application/octet-stream")


@dataclass
class _TakesAZip(Operation):
    """Documents the request body. It is streamed, so Litestar does not know about it."""

    def __post_init__(self) -> None:
        content = OpenAPIMediaType(schema=Schema(type="string", format="binary"))  # type: ignore[arg-type]
        self.request_body = RequestBody(required=True, content={"application/zip": content})


@post(
    "/v1/bundles",
    guards=[user_guard],
    opt={"scope": "bundles:write"},
    summary="Upload a zip of user code",
    description="The same content is the same bundle. A name points to the bundle last uploaded with it.",
    operation_class=_TakesAZip,
    responses=WITH_A_BODY,
    request_max_body_size=None,  # bundles have their own limit, checked while they are received
)
async def upload_bundle(
    request: Http,
    name: Annotated[
        str | None,
        QueryParameter(name="name", required=False, max_length=100, description="a name that jobs can use for it"),
    ] = None,
) -> BundleView:
    types = {value.partition(";")[0].strip().lower() for value in request.headers.getall("content-type", [])}
    if not types <= set(_ZIP):
        raise UnsupportedMediaType("Send a bundle as `application/zip`.")
    principal = principal_of(request)
    return await untrusted_of(request).bundles.upload(request.stream(), principal.org_id, principal.user, name)


@get("/v1/bundles", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Bundles, by digest")
async def list_bundles(request: Http, cursor: Cursor = None, limit: Limit = 100) -> BundlePage:
    return await untrusted_of(request).bundles.page(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/bundles/{bundle:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A bundle, by name or by a prefix of its digest",
)
async def get_bundle(request: Http, bundle: FromPath[str]) -> BundleView:
    return await untrusted_of(request).bundles.bundle(bundle, principal_of(request).org_id)


@delete(
    "/v1/bundles/{bundle:str}",
    guards=[user_guard],
    opt={"scope": "bundles:write"},
    status_code=200,
    summary="Delete a bundle that no job uses",
)
async def delete_bundle(request: Http, bundle: FromPath[str]) -> BundleView:
    return await untrusted_of(request).bundles.delete(bundle, principal_of(request).org_id)


HANDLERS = [upload_bundle, list_bundles, get_bundle, delete_bundle]
