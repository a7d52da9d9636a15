"""The live stream of the dashboard."""

from __future__ import annotations

from litestar import get
from litestar.response import Stream

from interlock.access.guards import session_guard, session_of
from interlock.http.requests import Http
from interlock.jobs.build import jobs_of

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@get("/v1/live", guards=[session_guard], include_in_schema=False)
async def live(request: Http) -> Stream:
    """Server-sent events for one open page; see docs/http-api.md."""
    session, streams = session_of(request), jobs_of(request).live
    session.principal.require("jobs:read")
    streams.require_room()
    events = streams.events(session.principal.org_id, session.session_id)
    return Stream(events, media_type="text/event-stream", headers=_HEADERS)


HANDLERS = [live]
