"""Who is calling. Guards run before a body is read, so a stranger learns nothing from validation errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from interlock.access.object_tokens import ObjectGrant
from interlock.access.principals import Principal, WorkerIdentity
from interlock.access.signed_urls import RESULTS, is_signed
from interlock.access.tokens import Claims
from interlock.api.object_requests import AskedObject, asked_object, query_of
from interlock.errors import Forbidden, TooManyRequests, Unauthenticated
from interlock.wiring import Kernel

WORKER_HEADER = "x-trace-worker-token"
CAPABILITY_HEADER = "x-trace-task-capability"
ORG_HEADER = "x-interlock-org"

Connection = ASGIConnection[Any, Any, Any, Any]
Headers = Callable[[str], Sequence[str]]
"""All values of a header, by its name in lower case."""
_KEY = "interlock.caller"
_GRANT = "interlock.object_grant"
_ORG = "interlock.org_of_result"


def kernel_of(connection: Connection) -> Kernel:
    kernel: Kernel = connection.app.state.kernel
    return kernel


def _presented(connection: Connection, header: str) -> str:
    return _only(connection.headers.getall(header, []), header)


def _only(values: Sequence[str], header: str) -> str:
    """One credential or none: of several, a proxy before us may have checked another than the one we would take."""
    if len(values) > 1:
        raise Unauthenticated(f"The request has several {header} headers; send one.")
    return values[0].strip(" \t") if values else ""


async def user_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """An API key, or a token of the identity provider, with the scope the handler asks for in its `opt`.

    A handler that is `warm` takes a key for valid that was so a moment ago.
    """
    asked = {"scope": handler.opt["scope"], "warm": bool(handler.opt.get("warm"))}
    headers = connection.headers
    principal = await user_of(kernel_of(connection), lambda name: headers.getall(name, []), **asked)
    connection.scope[_KEY] = principal  # type: ignore[literal-required]


async def user_of(kernel: Kernel, headers: Headers, *, scope: str, warm: bool) -> Principal:
    """Who is calling, if they may do what `scope` says, and not too often."""
    presented = _only(headers("authorization"), "authorization")
    scheme, _, key = presented.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("Send an API key: `Authorization: Bearer ilk_…`.")
    principal = await _user(kernel, key.lstrip(" "), _only(headers(ORG_HEADER), ORG_HEADER), warm=warm)
    kernel.lockout.proved(presented)
    principal.require(scope)
    most = kernel.settings.requests_per_second
    if most:
        wait = await kernel.request_limit.wait(principal.key_id, most)
        if wait is not None:
            raise TooManyRequests(f"This key may send {most} requests per second.", retry_after=wait)
    return principal


async def _user(kernel: Kernel, credential: str, org: str, *, warm: bool) -> Principal:
    if kernel.members.may_be(credential):
        return await kernel.members.authenticate(credential, org or None)
    principals = kernel.principals
    principal = await (principals.authenticate_warm if warm else principals.authenticate)(credential)
    if org and org != principal.org:
        raise Forbidden(f"This key is for the org {principal.org!r} and for no other.", code="not_a_member")
    return principal


async def worker_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = _presented(connection, WORKER_HEADER)
    if not token:
        raise Unauthenticated("Send a worker token: `X-Trace-Worker-Token: ilw_…`.")
    connection.scope[_KEY] = await kernel_of(connection).principals.authenticate_worker(token)  # type: ignore[literal-required]
    kernel_of(connection).lockout.proved(token)


async def capability_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = _presented(connection, CAPABILITY_HEADER)
    if not token:
        raise Unauthenticated("Send the attempt's capability token: `X-Trace-Task-Capability`.")
    connection.scope[_KEY] = await kernel_of(connection).capabilities.verify(token)  # type: ignore[literal-required]
    kernel_of(connection).lockout.proved(token)


async def object_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    """A signed URL for this very request, or an object token that reaches as far."""
    kernel, query = kernel_of(connection), query_of(connection)
    presented = _presented(connection, "authorization")
    if is_signed(query):
        if presented:
            raise Unauthenticated("A signed URL is a credential by itself; send no Authorization with it.")
        asked = asked_object(connection, kernel, query)
        await kernel.signed_urls.verify(asked.method, asked.key, query)
    else:
        grant = await _object_grant(kernel, presented)
        kernel.lockout.proved(presented)
        asked = asked_object(connection, kernel, query)
        if not await grant.allows(asked.method, asked.uri):
            raise Forbidden("The object token does not reach this object.", code="outside_grant")
        connection.scope[_GRANT] = grant  # type: ignore[literal-required]
    connection.scope[_KEY] = asked  # type: ignore[literal-required]


async def result_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """A signed URL of this very result, which names its org, or a user of an org."""
    query = query_of(connection)
    if not is_signed(query):
        await user_guard(connection, handler)
        connection.scope[_ORG] = connection.scope[_KEY].org_id  # type: ignore[literal-required]
        return
    if _presented(connection, "authorization"):
        raise Unauthenticated("A signed URL is a credential by itself; send no Authorization with it.")
    path = connection.scope["raw_path"].decode("ascii", errors="replace")
    await kernel_of(connection).results.urls.verify("GET", path.removeprefix(f"{RESULTS}/"), query)
    connection.scope[_ORG] = UUID(dict(query)["org"])  # type: ignore[literal-required]


def org_of_result(request: Request[Any, Any, Any]) -> UUID:
    org_id: UUID = request.scope[_ORG]  # type: ignore[literal-required]
    return org_id


async def _object_grant(kernel: Kernel, presented: str, *, to_write: bool = False) -> ObjectGrant:
    scheme, _, token = presented.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("Send an object token, `Authorization: Bearer …`, or use a signed URL.")
    return await kernel.object_tokens.verify(token.lstrip(" "), to_write=to_write)


SCHEMES: dict[Guard, str] = {
    user_guard: "apiKey",
    worker_guard: "workerToken",
    capability_guard: "capability",
    object_guard: "objectToken",
    result_guard: "apiKey",
}
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


def asked_of(request: Request[Any, Any, Any]) -> AskedObject:
    asked: AskedObject = request.scope[_KEY]  # type: ignore[literal-required]
    return asked


async def require_grant_still(request: Request[Any, Any, Any]) -> None:
    """An object token ends with its lease: what came in more slowly than that must not be seen any more."""
    if _GRANT in request.scope:
        await _object_grant(kernel_of(request), _presented(request, "authorization"), to_write=True)


def grant_of(request: Request[Any, Any, Any]) -> ObjectGrant:
    """Of the object token; a signed URL has none, and lists nothing."""
    grant: ObjectGrant = request.scope[_GRANT]  # type: ignore[literal-required]
    return grant
