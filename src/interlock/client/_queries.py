"""The SDK for queries: `QueryClient` asks the query service, `Client.queries` reads what was asked."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack
from uuid import UUID

import msgspec

from interlock.client._caller import Caller, bearer, path, query
from interlock.wire import QueryFormat, QueryMode, QueryPage, QueryReply, QueryView, UserQuery

PAGE = 100
PATIENCE_SECONDS = 5.0
REPLY_SECONDS = 3_700.0
"""The service ends a query that takes too long, and says so; an hour is the most that it can be told to allow."""

_reply = msgspec.json.Decoder(QueryReply)


class QueryOptions(TypedDict, total=False):
    """What a query takes beside its statement; `interlock.wire.UserQuery` says what each means."""

    datasets: Sequence[str] | None
    mode: QueryMode
    export: bool
    limit: int | None


class QueryClient:
    """Talks to a query service with an API key.

    async with QueryClient("http://127.0.0.1:7072", key) as queries:
        reply = await queries.ask("select count(*) from transfers")
        print(msgspec.json.decode(reply.rows))
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        verify: ssl.SSLContext | bool = True,
        patience: float = PATIENCE_SECONDS,
        org: str | None = None,
    ) -> None:
        self._caller = Caller(url, bearer(api_key, org), verify=verify, patience=patience)

    async def __aenter__(self) -> QueryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._caller.close()

    async def ask(self, sql: str, **options: Unpack[QueryOptions]) -> QueryReply:
        """The rows, or where they were exported to, or the batch task that has the query now."""
        body = _body(sql, QueryFormat.JSON, options)
        # Asking twice is harmless, unless it starts something.
        repeatable = body.mode is QueryMode.INTERACTIVE and not body.export
        return await self._caller.call("POST", "/v1/query", _reply, body, timeout=REPLY_SECONDS, repeatable=repeatable)

    async def stream(
        self, sql: str, form: QueryFormat, take: Callable[[bytes], object], **options: Unpack[QueryOptions]
    ) -> None:
        """Hands on CSV or Arrow IPC as it comes. Returns when that was all of it, and raises when it was not."""
        body = _body(sql, form, options)
        await self._caller.download("POST", "/v1/query", take, body, timeout=REPLY_SECONDS)


def _body(sql: str, form: QueryFormat, options: QueryOptions) -> UserQuery:
    datasets = options.get("datasets")
    return UserQuery(
        sql=sql,
        datasets=None if datasets is None else list(datasets),
        format=form,
        mode=options.get("mode", QueryMode.INTERACTIVE),
        export=options.get("export", False),
        limit=options.get("limit"),
    )


class QueryCalls:
    """As `Client.queries`, on the gateway."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> QueryPage:
        """Newest first."""
        target = query("/v1/queries", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, msgspec.json.Decoder(QueryPage))

    async def show(self, query_id: UUID | str) -> QueryView:
        """With fresh addresses of what was exported."""
        return await self._caller.call("GET", path("v1", "queries", query_id), msgspec.json.Decoder(QueryView))
