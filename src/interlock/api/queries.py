"""What was asked of the query service, on the gateway: history, and results of batch queries."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, get
from litestar.datastructures import State
from litestar.params import FromPath, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import QueryPage, QueryView

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@get(
    "/v1/queries",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="Queries of the org, newest first: who asked of which data, and how it ended",
)
async def list_queries(request: Http, cursor: Cursor = None, limit: Limit = 100) -> QueryPage:
    return await kernel_of(request).queries.page(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/queries/{query_id:str}",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="A query; with its task when it is a batch one, and with where its result is when that was exported",
)
async def get_query(request: Http, query_id: FromPath[UUID]) -> QueryView:
    return await kernel_of(request).queries.query(query_id, principal_of(request).org_id)


HANDLERS = [list_queries, get_query]
