"""The query listener: one SELECT on granted data, for attempts with capability tokens and users with API keys."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, Final, cast
from uuid import UUID

from litestar import MediaType, Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody
from litestar.response import Stream as Streamed

from interlock.access.guards import capability_guard, claims_of, principal_of, user_guard
from interlock.access.principals import PLATFORM
from interlock.client import QueryClient
from interlock.errors import BadRequest, ServerUnreachable, Unavailable
from interlock.http.requests import Cursor, Http, Limit, settings_of
from interlock.query.build import query_history_of
from interlock.query.service import QueryService, Stream
from interlock.telemetry import QUERIES_RUNNING, QUERIES_WAITING, metrics_text
from interlock.wire.queries import (
    QueryFormat,
    QueryOutcome,
    QueryPage,
    QueryReply,
    QueryView,
    RelationPage,
    TaskQuery,
    UserQuery,
)

QUERY_ID: Final = "Interlock-Query-Id"
MEDIA_TYPES: Final = {
    QueryFormat.CSV: "text/csv",
    QueryFormat.ARROW: "application/vnd.apache.arrow.stream",
}
_PASSED_ON: Final = ("Authorization", "Cookie", "X-Interlock-CSRF", "X-Interlock-Org")
_ACCEPTED: Final = {202: ResponseSpec(QueryReply, description="Submitted as a batch task", generate_examples=False)}


@post(
    "/v1/task/query",
    guards=[capability_guard],
    status_code=200,
    summary="Query the inputs of the attempt's task",
    description="With `format` csv or arrow, the response is a stream in that format.",
)
async def task_query(request: Http, data: JSONBody[TaskQuery]) -> Response[QueryReply]:
    asking = _service(request).ask_as_task(claims_of(request), data)
    return _response(await _while_connected(request, asking))


@post(
    "/v1/query",
    guards=[user_guard],
    opt={"scope": "query:read"},
    status_code=200,
    summary="Query datasets of the org",
    description="With `format` csv or arrow, the response is a stream in that format. A batch query returns 202.",
    responses=_ACCEPTED,
)
async def user_query(request: Http, data: JSONBody[UserQuery]) -> Response[QueryReply]:
    asking = _service(request).ask_as_user(principal_of(request), data)
    return _response(await _while_connected(request, asking))


def _service(request: Http) -> QueryService:
    service: QueryService = request.app.state.queries
    return service


def _response(answer: QueryReply | Stream) -> Response[QueryReply]:
    if isinstance(answer, Stream):
        streamed = Streamed(
            answer.parts,
            media_type=MEDIA_TYPES[answer.format],
            status_code=200,
            headers={QUERY_ID: str(answer.query_id)},
        )
        return cast("Response[QueryReply]", streamed)
    status = 202 if answer.outcome is QueryOutcome.BATCHED else 200
    return Response(answer, status_code=status, headers={QUERY_ID: str(answer.query_id)})


async def _while_connected(request: Http, asking: Coroutine[Any, Any, QueryReply | Stream]) -> QueryReply | Stream:
    """Cancels the query if the caller disconnects, so that its slot becomes free."""
    work = asyncio.create_task(asking)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise BadRequest("The connection closed before the query was complete.")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Http) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


@get(
    "/metrics",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    media_type=MediaType.TEXT,
    summary="Prometheus metrics of this process",
)
async def metrics(request: Http) -> bytes:
    places = _service(request).places
    QUERIES_RUNNING.set(places.running)
    QUERIES_WAITING.set(places.waiting)
    return metrics_text()


HANDLERS = [task_query, user_query, metrics]


@get(
    "/v1/queries",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="Queries of the org, newest first: caller, data and outcome",
)
async def list_queries(request: Http, cursor: Cursor = None, limit: Limit = 100) -> QueryPage:
    return await query_history_of(request).records.page(principal_of(request), cursor, limit)


@get(
    "/v1/queries/{query_id:str}",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="A query, with its task if it is a batch query, and the location of an exported result",
)
async def get_query(request: Http, query_id: FromPath[UUID]) -> QueryView:
    return await query_history_of(request).records.query(query_id, principal_of(request))


@post(
    "/v1/query",
    guards=[user_guard],
    opt={"scope": "query:read"},
    status_code=200,
    summary="Query datasets of the org, through the query service",
    description="For pages, which reach no other port. Only `format` json; larger results need `export`, or the query "
    "service itself.",
    responses=_ACCEPTED,
)
async def relay_query(request: Http, data: JSONBody[UserQuery]) -> Response[QueryReply]:
    if data.format is not QueryFormat.JSON:
        raise BadRequest("The gateway returns rows as JSON only: use `export`, or the query service.", code="json_only")
    settings = settings_of(request)
    headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
    verify = True if settings.tls_ca is None else ssl.create_default_context(cafile=str(settings.tls_ca))
    async with QueryClient.on_behalf(settings.query_base_url, headers, verify=verify) as queries:
        try:
            return _response(await _while_connected(request, queries.ask_request(data)))
        except ServerUnreachable:
            raise Unavailable("The query service does not answer; check that it is running.") from None


@get(
    "/v1/relations",
    guards=[user_guard],
    opt={"scope": "query:read"},
    summary="Datasets that the caller may query, with their names in SQL and their columns",
)
async def list_relations(request: Http, cursor: Cursor = None, limit: Limit = 100) -> RelationPage:
    return await query_history_of(request).catalogue.page(principal_of(request), cursor, limit)


RECORD_HANDLERS = [list_queries, get_query, relay_query, list_relations]
