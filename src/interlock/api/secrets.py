"""Secrets of an org over HTTP: set, listed and removed by its admins. No reply has a value."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, delete, get, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import OrgSecretPage, OrgSecretRequest, OrgSecretView

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None,
    QueryParameter(name="cursor", required=False, max_length=100, description="next_cursor of the last page"),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@put(
    "/v1/secrets/{secret:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Set a secret, or give it a new value",
    description="Configs of the org's jobs name it as `${secret:NAME}`. `hosts` replaces those that were set before. "
    "The value is stored sealed, and no endpoint returns it.",
)
async def set_secret(request: Http, secret: FromPath[str], data: JSONBody[OrgSecretRequest]) -> OrgSecretView:
    return await kernel_of(request).secrets.set(secret, data, principal_of(request))


@get("/v1/secrets", guards=[user_guard], opt={"scope": "admin"}, summary="Secrets by name, without their values")
async def list_secrets(request: Http, cursor: Cursor = None, limit: Limit = 100) -> OrgSecretPage:
    return await kernel_of(request).secrets.page(principal_of(request).org_id, cursor, limit)


@delete(
    "/v1/secrets/{secret:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Remove a secret; tasks that name it fail from then on",
)
async def remove_secret(request: Http, secret: FromPath[str]) -> OrgSecretView:
    return await kernel_of(request).secrets.remove(secret, principal_of(request))


HANDLERS = [set_secret, list_secrets, remove_secret]
