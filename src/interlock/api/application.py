"""What both listeners share: errors, request ids, limits, OpenAPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Litestar
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components

from interlock import __version__
from interlock.api.decoding import decode_directly
from interlock.api.middleware import observed
from interlock.api.problems import DOCUMENTED, HANDLERS
from interlock.wiring import Kernel


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
    middleware: Any = observed(listener)
    return Litestar(
        route_handlers=handlers,
        state=State({"kernel": kernel}),
        exception_handlers=HANDLERS,
        middleware=[middleware],
        request_max_body_size=kernel.settings.body_limit_bytes,
        openapi_config=OpenAPIConfig(
            title=title,
            version=__version__,
            path="/",
            render_plugins=[JsonRenderPlugin(path="/openapi.json")],
            components=components,
            security=[{scheme: []}],
        ),
        logging_config=None,
        debug=False,
    )
