"""Calls for datasets, published batches and queries: one method per endpoint."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import Final, TypedDict, Unpack
from uuid import UUID

from interlock.client._caller import Caller, bearer, path, query
from interlock.wire.datasets import (
    BufferPage,
    BufferView,
    DatasetPage,
    DatasetView,
    Direction,
    Invalidated,
    InvalidateRequest,
    Lineage,
    PartitionPage,
    PublishStatus,
    ScopeExplanation,
)
from interlock.wire.queries import QueryFormat, QueryMode, QueryPage, QueryReply, QueryView, RelationPage, UserQuery

PAGE: Final = 100


class BufferCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(
        self, status: PublishStatus | None = None, cursor: str | None = None, limit: int = PAGE
    ) -> BufferPage:
        target = query("/v1/buffers", status=status, cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, BufferPage)

    async def show(self, publish_id: UUID) -> BufferView:
        return await self._caller.call("GET", path("v1", "buffers", publish_id), BufferView)

    async def redrive(self, publish_id: UUID) -> BufferView:
        """Redrives a dead batch.

        Not retried after a lost reply: the second call would fail because the batch is Pending.
        """
        target = path("v1", "buffers", publish_id, "redrive")
        return await self._caller.call("POST", target, BufferView, repeatable=False)


class DatasetCalls:
    """A dataset is identified by its UUID, its published name, or `dag:job:output`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> DatasetPage:
        target = query("/v1/datasets", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, DatasetPage)

    async def show(self, dataset: UUID | str) -> DatasetView:
        return await self._caller.call("GET", path("v1", "datasets", dataset), DatasetView)

    async def partition_page(
        self,
        dataset: UUID | str,
        cursor: str | None = None,
        limit: int = PAGE,
        *,
        version: UUID | None = None,
        within: tuple[int | str, int | str] | None = None,
    ) -> PartitionPage:
        """Returns partitions that overlap `within`: of the current version, unless `version` is given."""
        first, last = within or (None, None)
        target = query(
            path("v1", "datasets", dataset, "partitions"),
            **{"version": version, "from": first, "to": last, "cursor": cursor, "limit": limit},
        )
        return await self._caller.call("GET", target, PartitionPage)

    async def lineage(
        self, dataset: UUID | str, direction: Direction = Direction.BOTH, depth: int | None = None
    ) -> Lineage:
        target = query(path("v1", "datasets", dataset, "lineage"), direction=direction, depth=depth)
        return await self._caller.call("GET", target, Lineage)

    async def invalidate(self, dataset: UUID | str, request: InvalidateRequest) -> Invalidated:
        """Invalidates a scope. Not retried after a lost reply: a second call would invalidate it again."""
        target = path("v1", "datasets", dataset, "invalidate")
        kind = Invalidated
        return await self._caller.call("POST", target, kind, request, repeatable=request.dry_run)

    async def explain(self, dag: str, job: str, start: int | str, end: int | str) -> ScopeExplanation:
        """Explains why a job has or has not processed a scope."""
        target = query(path("v1", "dags", dag, "jobs", job, "explain"), start=start, end=end)
        return await self._caller.call("GET", target, ScopeExplanation)


PATIENCE_SECONDS = 5.0
_RELAY_SECONDS = 1.0
REPLY_SECONDS = 3_700.0
"""The service cancels a query that takes too long and reports it. Its longest configurable timeout is one hour."""


class QueryOptions(TypedDict, total=False):
    """Options of a query; `interlock.wire.UserQuery` documents each one."""

    datasets: Sequence[str] | None
    mode: QueryMode
    export: bool
    limit: int | None


class QueryClient:
    """A client of the query service, authenticated by an API key.

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

    @classmethod
    def on_behalf(cls, url: str, headers: dict[str, str], *, verify: ssl.SSLContext | bool) -> QueryClient:
        """Returns a client that passes on the credential headers of somebody else's request."""
        client = cls.__new__(cls)
        client._caller = Caller(url, headers, verify=verify, patience=_RELAY_SECONDS)
        return client

    async def __aenter__(self) -> QueryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._caller.close()

    async def ask(self, sql: str, **options: Unpack[QueryOptions]) -> QueryReply:
        """Returns the rows, the URLs of an export, or the batch task that executes the query."""
        return await self.ask_request(_body(sql, QueryFormat.JSON, options))

    async def ask_request(self, body: UserQuery) -> QueryReply:
        # A repeated query is harmless, unless it starts an export or a batch task.
        repeatable = body.mode is QueryMode.INTERACTIVE and not body.export
        return await self._caller.call(
            "POST", "/v1/query", QueryReply, body, timeout=REPLY_SECONDS, repeatable=repeatable
        )

    async def stream(
        self, sql: str, form: QueryFormat, take: Callable[[bytes], object], **options: Unpack[QueryOptions]
    ) -> None:
        """Passes CSV or Arrow IPC to `take` as it arrives. Raises if the result is incomplete."""
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
    """The query history, as `Client.queries`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> QueryPage:
        """Returns a page of queries, newest first."""
        target = query("/v1/queries", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, QueryPage)

    async def relations(self, cursor: str | None = None, limit: int = PAGE) -> RelationPage:
        """Returns a page of the datasets that the caller may query, with their columns."""
        target = query("/v1/relations", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, RelationPage)

    async def show(self, query_id: UUID | str) -> QueryView:
        """Returns a query, with fresh URLs for its export."""
        return await self._caller.call("GET", path("v1", "queries", query_id), QueryView)
