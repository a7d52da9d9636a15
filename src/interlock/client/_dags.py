"""Calls for DAGs, sources and backfills: one method per endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlencode
from uuid import UUID, uuid4

from interlock.client._caller import Caller, path, query
from interlock.client._http import refuse_line_breaks
from interlock.wire.dags import (
    BackfillAnswer,
    BackfillPage,
    BackfillRequest,
    BackfillView,
    DagDeleted,
    DagDeployed,
    DagDocument,
    DagPage,
    DagPauseRequest,
    DagRequest,
    DagVersionPage,
    DagVersionView,
    DagView,
    FailingJobs,
    HookSecret,
    PurgeRequest,
    RollbackRequest,
    SecretRequest,
    SourceEvent,
    SourceEvents,
    SourceEventsAccepted,
    SourceList,
)

BACKFILL_PAGE = 100


class BackfillCalls:
    """A backfill is identified by its run."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def start(self, dag: str, job: str, request: BackfillRequest) -> BackfillAnswer:
        target = path("v1", "dags", dag, "jobs", job, "backfills")
        kind = BackfillAnswer
        return await self._caller.call("POST", target, kind, request, repeatable=request.dry_run)

    async def page(self, cursor: str | None = None, limit: int = BACKFILL_PAGE) -> BackfillPage:
        target = query("/v1/backfills", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, BackfillPage)

    async def show(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("GET", path("v1", "backfills", run_id), BackfillView)

    async def wait(
        self,
        run_id: UUID | str,
        on_progress: Callable[[BackfillView], None] | None = None,
        poll_seconds: float = 0.5,
    ) -> BackfillView:
        """Polls until the last task has ended and returns the backfill.

        Each poll, the last included, calls `on_progress`.
        """
        while True:
            found = await self.show(run_id)
            if on_progress is not None:
                on_progress(found)
            if found.ended_at is not None:
                return found
            await asyncio.sleep(poll_seconds)

    async def pause(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("POST", path("v1", "backfills", run_id, "pause"), BackfillView)

    async def resume(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("POST", path("v1", "backfills", run_id, "resume"), BackfillView)

    async def cancel(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("POST", path("v1", "backfills", run_id, "cancel"), BackfillView)


PAGE: Final = 100


class DagCalls:
    """A DAG is identified by its name, a version by a prefix of its content hash."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def deploy(
        self,
        yaml: str,
        *,
        dry_run: bool = False,
        operators: Sequence[str] = (),
        force: bool = False,
        file: str | None = None,
    ) -> DagDeployed:
        """Deploys a DAG. `operators` are the names under which your workers register operators.

        With `force`, it is deployed although no live worker has one of its operators. `file` is the name of the file in
        its problems.
        """
        parameters = [("dry_run", str(dry_run).lower()), *(("operator", name) for name in operators)]
        parameters += [("force", "true")] if force else []
        parameters += [("file", file)] if file is not None else []
        target = f"/v1/dags?{urlencode(parameters)}"
        return await self._caller.call("POST", target, DagDeployed, DagRequest(yaml=yaml))

    async def failures(self, dag: str | None = None, limit: int = PAGE) -> FailingJobs:
        """Returns the jobs of DAGs with tasks that are failed now."""
        return await self._caller.call("GET", query("/v1/failing-jobs", dag=dag, limit=limit), FailingJobs)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> DagPage:
        return await self._caller.call("GET", query("/v1/dags", cursor=cursor, limit=limit), DagPage)

    async def dag(self, name: str) -> DagView:
        return await self._caller.call("GET", path("v1", "dags", name), DagView)

    async def versions(self, name: str, cursor: str | None = None, limit: int = PAGE) -> DagVersionPage:
        target = query(path("v1", "dags", name, "versions"), cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, DagVersionPage)

    async def document(self, name: str) -> DagDocument:
        return await self._caller.call("GET", path("v1", "dags", name, "document"), DagDocument)

    async def rollback(self, name: str, to: str | None = None) -> DagVersionView:
        """Rolls back to the version whose content hash starts with `to`; by default to the previous one."""
        target = path("v1", "dags", name, "rollback")
        return await self._caller.call(
            "POST", target, DagVersionView, RollbackRequest(to=to), repeatable=to is not None
        )

    async def cut_over(self, name: str) -> DagVersionView:
        return await self._caller.call("POST", path("v1", "dags", name, "cutover"), DagVersionView, repeatable=False)

    async def pause(self, name: str, reason: str | None = None) -> DagView:
        """Pauses a DAG with its sources. Running tasks end; changes are recorded and processed after the resume."""
        return await self._caller.call(
            "POST", path("v1", "dags", name, "pause"), DagView, DagPauseRequest(reason=reason)
        )

    async def resume(self, name: str) -> DagView:
        return await self._caller.call("POST", path("v1", "dags", name, "resume"), DagView)

    async def delete(self, name: str, *, purge: bool = False, dry_run: bool = False) -> DagDeleted:
        """Deletes a DAG. Without `purge`, its data stays readable. A dry run shows what would be deleted."""
        target = query(path("v1", "dags", name), purge=str(purge).lower(), dry_run=str(dry_run).lower())
        return await self._caller.call("DELETE", target, DagDeleted, repeatable=dry_run)

    async def purge(self, name: str, version: str) -> DagVersionView:
        return await self._caller.call(
            "POST", path("v1", "dags", name, "purge"), DagVersionView, PurgeRequest(version=version)
        )


class SourceCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def of_dag(self, dag: str) -> SourceList:
        return await self._caller.call("GET", path("v1", "dags", dag, "sources"), SourceList)

    async def send(
        self, dag: str, job: str, events: Sequence[SourceEvent], *, idempotency_key: str | None = None
    ) -> SourceEventsAccepted:
        """Sends events. The default `idempotency_key` is random: a retry after a lost reply sends nothing twice."""
        key = idempotency_key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        return await self._caller.call(
            "POST",
            path("v1", "dags", dag, "jobs", job, "events"),
            SourceEventsAccepted,
            SourceEvents(events=list(events)),
            extra=f"Idempotency-Key: {key}\r\n",
        )

    async def make_secret(self, dag: str, job: str, *, rotate: bool = False) -> HookSecret:
        """Creates a secret. Not retried: the secret of a lost reply cannot be read again."""
        target = path("v1", "dags", dag, "jobs", job, "secret")
        kind = HookSecret
        return await self._caller.call("POST", target, kind, SecretRequest(rotate=rotate), repeatable=False)
