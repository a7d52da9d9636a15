"""Health and metrics, alike on every listener."""

from __future__ import annotations

from litestar import MediaType, Response, get
from litestar.openapi.datastructures import ResponseSpec

from interlock.access.guards import user_guard
from interlock.access.principals import PLATFORM
from interlock.apps.stores import Stores
from interlock.http.parameters import Http
from interlock.telemetry import metrics_text
from interlock.wire import Health

DEGRADED = {503: ResponseSpec(Health, description="The database is away", generate_examples=False)}


@get("/healthz", summary="Whether this process can work", responses=DEGRADED)
async def health(request: Http) -> Response[Health]:
    stores: Stores = request.app.state.stores
    checks = {"database": "ok", "valkey": "ok"}
    try:
        async with stores.database.connection() as connection:
            await connection.fetchval("select 1", timeout=2)
    except Exception as error:
        checks["database"] = type(error).__name__
    if stores.coordination is None:
        checks["valkey"] = "not configured"
    elif not await stores.coordination.answers():
        checks["valkey"] = "away"
    good = checks["database"] == "ok"
    whole = good and checks["valkey"] != "away"
    return Response(Health(status="ok" if whole else "degraded", checks=checks), status_code=200 if good else 503)


@get(
    "/metrics",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    media_type=MediaType.TEXT,
    summary="Prometheus metrics of this process",
)
async def metrics() -> bytes:
    return metrics_text()
