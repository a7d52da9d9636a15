"""Endpoints of the gateway for the query history and the results of batch queries."""

from __future__ import annotations

from uuid import UUID

from litestar import get
from litestar.params import FromPath

from interlock.access.guards import principal_of, user_guard
from interlock.http.parameters import Cursor, Http, Limit
from interlock.query.build import query_history_of
from interlock.wire import QueryPage, QueryView


@get(
    "/v1/queries",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="Queries of the org, newest first: caller, data and outcome",
)
async def list_queries(request: Http, cursor: Cursor = None, limit: Limit = 100) -> QueryPage:
    return await query_history_of(request).records.page(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/queries/{query_id:str}",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="A query, with its task if it is a batch query, and the location of an exported result",
)
async def get_query(request: Http, query_id: FromPath[UUID]) -> QueryView:
    return await query_history_of(request).records.query(query_id, principal_of(request).org_id)


HANDLERS = [list_queries, get_query]
