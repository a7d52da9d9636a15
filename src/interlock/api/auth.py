"""Who is calling. Guards run before a body is read, so a stranger learns nothing from validation errors."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from interlock.access.principals import Principal, WorkerIdentity
from interlock.access.tokens import Claims
from interlock.errors import TooManyRequests, Unauthenticated
from interlock.wiring import Kernel

WORKER_HEADER = "x-trace-worker-token"
CAPABILITY_HEADER = "x-trace-task-capability"

Connection = ASGIConnection[Any, Any, Any, Any]
_KEY = "interlock.caller"


def kernel_of(connection: Connection) -> Kernel:
    kernel: Kernel = connection.app.state.kernel
    return kernel


def _presented(connection: Connection, header: str) -> str:
    """One credential or none: of several, a proxy before us may have checked another than the one we would take."""
    values = connection.headers.getall(header, [])
    if len(values) > 1:
        raise Unauthenticated(f"The request has several {header} headers; send one.")
    return values[0].strip(" \t") if values else ""


async def user_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """An API key with the scope the handler asks for in its `opt`."""
    kernel = kernel_of(connection)
    scheme, _, key = _presented(connection, "authorization").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("Send an API key: `Authorization: Bearer ilk_…`.")
    principal = await kernel.principals.authenticate(key.lstrip(" "))
    principal.require(handler.opt["scope"])
    most = kernel.settings.requests_per_second
    if most and kernel.coordination is not None:
        wait = await kernel.coordination.over_limit(principal.key_id, most)
        if wait is not None:
            raise TooManyRequests(f"This key may send {most} requests per second.", retry_after=wait)
    connection.scope[_KEY] = principal  # type: ignore[literal-required]


async def worker_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = _presented(connection, WORKER_HEADER)
    if not token:
        raise Unauthenticated("Send a worker token: `X-Trace-Worker-Token: ilw_…`.")
    connection.scope[_KEY] = await kernel_of(connection).principals.authenticate_worker(token)  # type: ignore[literal-required]


async def capability_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = _presented(connection, CAPABILITY_HEADER)
    if not token:
        raise Unauthenticated("Send the attempt's capability token: `X-Trace-Task-Capability`.")
    connection.scope[_KEY] = await kernel_of(connection).tokens.verify(token)  # type: ignore[literal-required]


SCHEMES: dict[Guard, str] = {user_guard: "apiKey", worker_guard: "workerToken", capability_guard: "capability"}
"""By the name that the OpenAPI documents have for each credential."""


def principal_of(request: Request[Any, Any, Any]) -> Principal:
    principal: Principal = request.scope[_KEY]  # type: ignore[literal-required]
    return principal


def worker_of(request: Request[Any, Any, Any]) -> WorkerIdentity:
    worker: WorkerIdentity = request.scope[_KEY]  # type: ignore[literal-required]
    return worker


def claims_of(request: Request[Any, Any, Any]) -> Claims:
    claims: Claims = request.scope[_KEY]  # type: ignore[literal-required]
    return claims
