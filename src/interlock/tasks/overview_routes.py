"""Endpoints of the dashboard: the overview of an org, its newest failures, and the insides of a run."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from litestar import get
from litestar.params import FromPath, QueryParameter

from interlock.access.guards import principal_of, user_guard
from interlock.http.requests import Http
from interlock.tasks.build import tasks_of
from interlock.wire.overview import FailureList, Overview, RunDurations, RunFailures, RunTimeline, SearchHits

Few = Annotated[int, QueryParameter(name="limit", ge=1, le=200, description="maximum number of items")]


@get(
    "/v1/overview",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Processes, throughput of the last hour, queues, live runs and newest failures",
)
async def get_overview(request: Http) -> Overview:
    return await tasks_of(request).dashboard.overviews.overview(principal_of(request).org_id)


@get(
    "/v1/failures",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Failed attempts of the last day, newest first",
    description="Looks at the 300 newest failed attempts of the installation; those of other orgs are left out.",
)
async def list_failures(request: Http, limit: Few = 50) -> FailureList:
    return FailureList(
        failures=await tasks_of(request).dashboard.overviews.failures(principal_of(request).org_id, limit)
    )


@get(
    "/v1/runs/{run_id:str}/failures",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Failed tasks of a run, grouped by error class and message",
)
async def get_run_failures(request: Http, run_id: FromPath[UUID]) -> RunFailures:
    return await tasks_of(request).dashboard.overviews.run_failures(run_id, principal_of(request).org_id)


@get(
    "/v1/runs/{run_id:str}/timeline",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Attempts of a run by time; of a large run, those of evenly spaced tasks",
)
async def get_run_timeline(request: Http, run_id: FromPath[UUID]) -> RunTimeline:
    return await tasks_of(request).dashboard.overviews.timeline(run_id, principal_of(request).org_id)


@get(
    "/v1/runs/{run_id:str}/durations",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="How long tasks of a run took; of a large run, evenly spaced tasks",
)
async def get_run_durations(request: Http, run_id: FromPath[UUID]) -> RunDurations:
    return await tasks_of(request).dashboard.overviews.durations(run_id, principal_of(request).org_id)


@get(
    "/v1/search",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Anything by its id, or by the beginning of its name",
)
async def search(
    request: Http, q: Annotated[str, QueryParameter(name="q", min_length=1, max_length=200)]
) -> SearchHits:
    return await tasks_of(request).dashboard.search.find(q, principal_of(request))


HANDLERS = [search, get_overview, list_failures, get_run_failures, get_run_timeline, get_run_durations]
