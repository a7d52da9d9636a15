"""How the routes of an org are."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, get
from litestar.datastructures import State
from litestar.params import QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire.bus_health import RouteHealthPage

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]
OnlyBad = Annotated[bool, QueryParameter(name="bad", required=False, description="only those that are not healthy")]


@get("/v1/route-health", guards=[user_guard], opt={"scope": "registry:read"}, summary="How routes are, by their names")
async def list_route_health(
    request: Http, bad: OnlyBad = False, cursor: Cursor = None, limit: Limit = 100
) -> RouteHealthPage:
    return await kernel_of(request).route_health.page(principal_of(request), cursor, limit, only_bad=bad)


HANDLERS = [list_route_health]
