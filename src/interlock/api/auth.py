"""Who is calling. Guards run before a body is read, so a stranger learns nothing from validation errors."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

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


async def user_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """An API key with the scope the handler asks for in its `opt`."""
    kernel = kernel_of(connection)
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("Send an API key: `Authorization: Bearer ilk_…`.")
    principal = await kernel.principals.authenticate(key.strip())
    principal.require(handler.opt["scope"])
    most = kernel.settings.requests_per_second
    if most and kernel.coordination is not None:
        wait = await kernel.coordination.over_limit(principal.key_id, most)
        if wait is not None:
            raise TooManyRequests(f"This key may send {most} requests per second.", retry_after=wait)
    connection.scope[_KEY] = principal  # type: ignore[literal-required]


async def worker_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = connection.headers.get(WORKER_HEADER)
    if not token:
        raise Unauthenticated("Send a worker token: `X-Trace-Worker-Token: ilw_…`.")
    connection.scope[_KEY] = await kernel_of(connection).principals.authenticate_worker(token)  # type: ignore[literal-required]


async def capability_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = connection.headers.get(CAPABILITY_HEADER)
    if not token:
        raise Unauthenticated("Send the attempt's capability token: `X-Trace-Task-Capability`.")
    connection.scope[_KEY] = await kernel_of(connection).tokens.verify(token)  # type: ignore[literal-required]


def principal_of(request: Request[Any, Any, Any]) -> Principal:
    principal: Principal = request.scope[_KEY]  # type: ignore[literal-required]
    return principal


def worker_of(request: Request[Any, Any, Any]) -> WorkerIdentity:
    worker: WorkerIdentity = request.scope[_KEY]  # type: ignore[literal-required]
    return worker


def claims_of(request: Request[Any, Any, Any]) -> Claims:
    claims: Claims = request.scope[_KEY]  # type: ignore[literal-required]
    return claims
