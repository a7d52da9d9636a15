"""What both listeners share: errors, request ids, limits, OpenAPI."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from litestar import HttpMethod, Litestar, MediaType, Response, Router, route
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components
from litestar.routes import BaseRoute

from interlock import __version__
from interlock.api.auth import SCHEMES
from interlock.api.decoding import decode_directly, takes_a_body
from interlock.api.express import Express, with_express
from interlock.api.middleware import observed
from interlock.api.openapi import DocumentPlugin
from interlock.api.problems import DOCUMENTED, HANDLERS, WITH_A_BODY
from interlock.wiring import Kernel


class _SchemaRouter(Router):
    """Serves the document alone: Litestar would add an HTML page for whatever path has no other handler."""

    def register(self, value: Any) -> list[BaseRoute]:
        is_page = isinstance(value, HTTPRouteHandler) and value.media_type is MediaType.HTML
        return [] if is_page else super().register(value)


def _options(handlers: Sequence[HTTPRouteHandler]) -> list[HTTPRouteHandler]:
    """Litestar's own would name only the methods of the path's first handler."""
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


def application(
    kernel: Kernel,
    listener: str,
    handlers: Sequence[HTTPRouteHandler],
    *,
    title: str,
    components: Components,
    express: Express | None = None,
) -> Litestar:
    for handler in handlers:
        decode_directly(handler)
        problems = DOCUMENTED | (WITH_A_BODY if takes_a_body(handler) else {})
        handler.responses = problems | dict(handler.responses or {})
        handler.security = [{SCHEMES[guard]: []} for guard in handler.guards or ()]
    app = Litestar(
        route_handlers=[*_options(handlers), *handlers],
        state=State({"kernel": kernel}),
        exception_handlers=HANDLERS,
        request_max_body_size=kernel.settings.body_limit_bytes,
        openapi_config=OpenAPIConfig(
            title=title,
            version=__version__,
            openapi_router=_SchemaRouter("/", route_handlers=[], include_in_schema=False),
            render_plugins=[DocumentPlugin(path="/openapi.json")],
            components=components,
        ),
        logging_config=None,
        debug=False,
    )
    if express is not None:
        app.asgi_handler = with_express(express, app.asgi_handler)
    # Around the routing, too: an unknown path and a wrong method are requests like any other.
    app.asgi_handler = observed(listener)(app.asgi_handler)
    return app
