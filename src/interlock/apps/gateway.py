"""The gateway process: the public listener, for users with API keys."""

from __future__ import annotations

import structlog
from litestar import Litestar
from litestar.openapi.spec import Components, SecurityScheme

from interlock.access import object_routes
from interlock.access import routes as access
from interlock.access import session_routes as sessions
from interlock.apps import dashboard_files
from interlock.apps.app import App, open_app
from interlock.apps.http_application import application, health
from interlock.apps.metrics import metrics
from interlock.apps.process import listener_of, serve, stop_on_signals
from interlock.bus import routes as bus
from interlock.bus.path import routes as commands
from interlock.bus.registry import routes as registry
from interlock.dags import routes as dags
from interlock.datasets import routes as datasets
from interlock.http.listener import url_of
from interlock.jobs import bulk_routes, live_routes
from interlock.jobs import routes as jobs
from interlock.query import routes
from interlock.settings import Settings
from interlock.tasks import overview_routes
from interlock.tasks import routes as tasks
from interlock.untrusted import routes as bundles
from interlock.webhooks import routes as webhooks

log = structlog.get_logger()

HANDLERS = [
    *jobs.HANDLERS,
    *bulk_routes.HANDLERS,
    *live_routes.HANDLERS,
    *tasks.HANDLERS,
    *overview_routes.HANDLERS,
    *access.HANDLERS,
    *sessions.HANDLERS,
    *dags.HANDLERS,
    *bundles.HANDLERS,
    health,
    metrics,
    *datasets.HANDLERS,
    *routes.RECORD_HANDLERS,
    *object_routes.HANDLERS,
    *webhooks.HANDLERS,
    *commands.HANDLERS,
    *bus.HANDLERS,
    *registry.HANDLERS,
    *dashboard_files.HANDLERS,
]


def gateway(app: App) -> Litestar:
    key = SecurityScheme(
        type="http", scheme="bearer", description="An API key, `ilk_…`, or a token of the identity provider."
    )
    token = SecurityScheme(
        type="http", scheme="bearer", description="An object token; a signed URL needs none: it has its proof in it."
    )
    session = SecurityScheme(
        type="apiKey",
        name=app.access.sessions.cookie_name,
        security_scheme_in="cookie",
        description="A session of the dashboard. A change needs the header `X-Interlock-CSRF`, too.",
    )
    return application(
        app,
        "gateway",
        HANDLERS,
        title="Interlock gateway",
        components=Components(security_schemes={"apiKey": key, "objectToken": token, "session": session}),
        express=commands.express,
    )


async def run_gateway(settings: Settings, *, descriptor: int | None = None) -> None:
    listener = listener_of(settings, settings.gateway, "gateway", descriptor)
    stop = stop_on_signals()
    async with open_app(settings, process="gateway") as app:
        log.info("listening", at=url_of(listener, settings))
        await serve(gateway(app), listener, settings, stop=stop, on_stop=app.stores.wakeups.close)
