"""The parts that all listeners share: errors, request ids, limits, OpenAPI and health."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

from litestar import HttpMethod, Litestar, MediaType, Response, Router, get, route
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Components
from litestar.routes import BaseRoute
from litestar.types import ASGIApp

from interlock import __version__
from interlock.access.guards import SCHEMES
from interlock.apps.app import App
from interlock.apps.stores import Stores
from interlock.http.middleware import observed
from interlock.http.openapi import DocumentPlugin
from interlock.http.problems import DOCUMENTED, HANDLERS, WITH_A_BODY
from interlock.http.requests import Http, decode_directly, takes_a_body
from interlock.settings import Settings
from interlock.wire.access import Health


class _SchemaRouter(Router):
    """Serves only the OpenAPI document; Litestar would also add an HTML page for unmatched paths.

    The document is at `/` too, unless a handler of the listener has that path.
    """

    keeps_root = True

    def register(self, value: Any) -> list[BaseRoute]:
        if isinstance(value, HTTPRouteHandler):
            if value.media_type is MediaType.HTML:
                return []
            value.paths = {path for path in value.paths if self.keeps_root or path != "/"}
        return super().register(value)


def _options(handlers: Sequence[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """Builds OPTIONS handlers. Litestar's own would list only the methods of the first handler of a path."""
    allowed: defaultdict[str, set[str]] = defaultdict(lambda: {"OPTIONS"})
    for handler in handlers:
        for path in handler.paths:
            allowed[path] |= {str(method) for method in handler.http_methods}
    return [_options_of(path, ", ".join(sorted(methods))) for path, methods in allowed.items()]


def _options_of(path: str, allow: str) -> HTTPRouteHandler:
    @route(path, http_method=[HttpMethod.OPTIONS], status_code=204, include_in_schema=False)
    async def options() -> Response[None]:
        return Response(None, status_code=204, headers={"Allow": allow})

    return options


def capabilities(app: App) -> dict[str, Any]:
    """Returns what handlers find in the state of their listener, by name."""
    return {field.name: getattr(app, field.name) for field in fields(app)}


_REPORT_BYTES: Final = 64 * 1024
"""Size of a report without its result."""


def _body_limit(settings: Settings, listener: str) -> int:
    """Returns the limit of request bodies. A dispatcher takes the report of one result of the maximum size."""
    own = settings.body_limit_bytes
    return max(own, settings.result_limit_bytes + _REPORT_BYTES) if listener == "dispatcher" else own


def application(
    app: App,
    listener: str,
    handlers: Sequence[HTTPRouteHandler],
    *,
    title: str,
    components: Components,
    express: Callable[[ASGIApp], ASGIApp] | None = None,
) -> Litestar:
    for handler in handlers:
        decode_directly(handler)
        problems = DOCUMENTED | (WITH_A_BODY if takes_a_body(handler) else {})
        handler.responses = problems | dict(handler.responses or {})
        handler.security = [{SCHEMES[guard]: []} for guard in handler.guards or ()]
    schema = _SchemaRouter("/", route_handlers=[], include_in_schema=False)
    schema.keeps_root = not any("/" in handler.paths for handler in handlers)
    listening = Litestar(
        route_handlers=[*_options(handlers), *handlers],
        state=State(capabilities(app)),
        exception_handlers=HANDLERS,
        request_max_body_size=_body_limit(app.settings, listener),
        openapi_config=OpenAPIConfig(
            title=title,
            version=__version__,
            openapi_router=schema,
            render_plugins=[DocumentPlugin(path="/openapi.json")],
            components=components,
        ),
        logging_config=None,
        debug=False,
    )
    if express is not None:
        listening.asgi_handler = express(listening.asgi_handler)
    # This wraps the routing too, so that unknown paths and wrong methods are counted like other requests.
    listening.asgi_handler = observed(listener, app.access.lockout)(listening.asgi_handler)
    return listening


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
