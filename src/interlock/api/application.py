"""What both listeners share: errors, request ids, limits, OpenAPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Litestar, MediaType, Router
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components
from litestar.routes import BaseRoute

from interlock import __version__
from interlock.api.decoding import decode_directly
from interlock.api.middleware import observed
from interlock.api.problems import DOCUMENTED, HANDLERS
from interlock.wiring import Kernel


class _SchemaRouter(Router):
    """Serves the document alone: Litestar would add an HTML page for whatever path has no other handler."""

    def register(self, value: Any) -> list[BaseRoute]:
        is_page = isinstance(value, HTTPRouteHandler) and value.media_type is MediaType.HTML
        return [] if is_page else super().register(value)


def application(
    kernel: Kernel,
    listener: str,
    handlers: Sequence[HTTPRouteHandler],
    *,
    title: str,
    components: Components,
) -> Litestar:
    scheme = next(iter(components.security_schemes or {}))
    for handler in handlers:
        decode_directly(handler)
        handler.responses = dict(DOCUMENTED) | dict(handler.responses or {})
    app = Litestar(
        route_handlers=handlers,
        state=State({"kernel": kernel}),
        exception_handlers=HANDLERS,
        request_max_body_size=kernel.settings.body_limit_bytes,
        openapi_config=OpenAPIConfig(
            title=title,
            version=__version__,
            openapi_router=_SchemaRouter("/", route_handlers=[], include_in_schema=False),
            render_plugins=[JsonRenderPlugin(path="/openapi.json")],
            components=components,
            security=[{scheme: []}],
        ),
        logging_config=None,
        debug=False,
    )
    # Around the routing, too: an unknown path and a wrong method are requests like any other.
    app.asgi_handler = observed(listener)(app.asgi_handler)
    return app
