"""Members of an org: users of the identity provider who are let in."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, delete, get, post
from litestar.datastructures import State
from litestar.params import JSONBody, QueryParameter

from interlock.access.principals import PLATFORM
from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import MemberPage, MemberRequest, MemberView

Http = Request[Any, Any, State]
Subject = Annotated[str, QueryParameter(name="subject", min_length=1, max_length=255, description="whom to remove")]
Org = Annotated[
    str | None,
    QueryParameter(
        name="org",
        required=False,
        min_length=1,
        max_length=200,
        description="another org than yours; needs the platform scope",
    ),
]
Cursor = Annotated[
    str | None,
    QueryParameter(name="cursor", required=False, max_length=255, description="next_cursor of the last page"),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@get("/v1/members", guards=[user_guard], opt={"scope": "admin"}, summary="Members of the org")
async def list_members(request: Http, org: Org = None, cursor: Cursor = None, limit: Limit = 100) -> MemberPage:
    return await kernel_of(request).members.page(await _org(request, org), cursor, limit)


@post(
    "/v1/members",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Let a user of the identity provider in, or change their role",
)
async def allow_member(request: Http, data: JSONBody[MemberRequest]) -> MemberView:
    org_id = await _org(request, data.org)
    return await kernel_of(request).members.allow(data, org_id, by=principal_of(request))


@delete(
    "/v1/members",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Let a user in no longer; works at once",
)
async def disallow_member(request: Http, subject: Subject, org: Org = None) -> MemberView:
    return await kernel_of(request).members.disallow(subject, await _org(request, org))


async def _org(request: Http, name: str | None) -> UUID:
    caller = principal_of(request)
    if name is None or name == caller.org:
        return caller.org_id
    caller.require(PLATFORM)
    return (await kernel_of(request).principals.org(name)).org_id


HANDLERS = [list_members, allow_member, disallow_member]
