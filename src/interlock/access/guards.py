"""Authentication. Guards run before the body is read, so unauthenticated callers never see validation errors."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from litestar import Request
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from interlock.access.build import Access, access_of
from interlock.access.object_requests import AskedObject, asked_object, query_of
from interlock.access.object_tokens import ObjectGrant
from interlock.access.principals import Principal, WorkerIdentity
from interlock.access.sessions import CSRF_HEADER, SAFE_METHODS, Session
from interlock.access.signed_urls import RESULTS, is_signed
from interlock.access.tokens import Claims
from interlock.errors import Forbidden, TooManyRequests, Unauthenticated
from interlock.http.requests import Connection, Headers

WORKER_HEADER = "x-trace-worker-token"
CAPABILITY_HEADER = "x-trace-task-capability"
ORG_HEADER = "x-interlock-org"

_KEY = "interlock.caller"
_GRANT = "interlock.object_grant"
_ORG = "interlock.org_of_result"
_SESSION = "interlock.session"


def _presented(connection: Connection, header: str) -> str:
    return _only(connection.headers.getall(header, []), header)


def _only(values: Sequence[str], header: str) -> str:
    """Returns the only value of a header.

    Of several credentials, a proxy might have checked another one than we would.
    """
    if len(values) > 1:
        raise Unauthenticated(f"The request has several {header} headers; send only one.")
    return values[0].strip(" \t") if values else ""


async def user_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """Accepts an API key, a token of the identity provider or a session, with the scope in the handler's `opt`.

    A handler marked `warm` accepts a key that was valid a moment ago, from a cache.
    """
    access, headers = access_of(connection), headers_of(connection)
    if not headers("authorization") and access.sessions.cookie_in(headers) is not None:
        session = await _session(access, connection)
        session.principal.require(handler.opt["scope"])
        await _within_limit(access, session.principal)
        connection.scope[_KEY] = session.principal  # type: ignore[literal-required]
        return
    asked = {"scope": handler.opt["scope"], "warm": bool(handler.opt.get("warm"))}
    principal = await user_of(access, headers, **asked)
    connection.scope[_KEY] = principal  # type: ignore[literal-required]


async def session_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    """Accepts only a session: an API key has no session to show, to change or to end."""
    await _session(access_of(connection), connection)


async def _session(access: Access, connection: Connection) -> Session:
    """Authenticates the session of a request. A change also needs its CSRF token, which other sites cannot read."""
    headers = headers_of(connection)
    session = await access.sessions.authenticate(access.sessions.cookie_in(headers))
    if connection.scope.get("method") not in SAFE_METHODS:
        presented = _only(headers(CSRF_HEADER), CSRF_HEADER)
        if not hmac.compare_digest(presented.encode(), session.csrf.encode()):
            raise Forbidden("Send the `csrf` of GET /v1/session as the header X-Interlock-CSRF.", code="csrf")
    connection.scope[_SESSION] = session  # type: ignore[literal-required]
    return session


def headers_of(connection: Connection) -> Headers:
    headers = connection.headers
    return lambda name: headers.getall(name, [])


async def user_of(access: Access, headers: Headers, *, scope: str, warm: bool) -> Principal:
    """Authenticates a user, and checks the scope and the rate limit."""
    presented = _only(headers("authorization"), "authorization")
    scheme, _, key = presented.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated("Send an API key: `Authorization: Bearer ilk_…`.")
    principal = await _user(access, key.lstrip(" "), _only(headers(ORG_HEADER), ORG_HEADER), warm=warm)
    access.lockout.proved(presented)
    principal.require(scope)
    await _within_limit(access, principal)
    return principal


async def _within_limit(access: Access, principal: Principal) -> None:
    wait = await access.request_limit.wait(principal.key_id)
    if wait is not None:
        limit = access.request_limit.per_second
        raise TooManyRequests(f"This key exceeds {limit} requests per second; retry later.", retry_after=wait)


async def _user(access: Access, credential: str, org: str, *, warm: bool) -> Principal:
    if access.principals.members.may_be(credential):
        return await access.principals.members.authenticate(credential, org or None)
    principals = access.principals
    principal = await (principals.authenticate_warm if warm else principals.authenticate)(credential)
    if org and org != principal.org:
        raise Forbidden(
            f"This key belongs to the org {principal.org!r} and is not valid for another one.", code="not_a_member"
        )
    return principal


async def worker_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = _presented(connection, WORKER_HEADER)
    if not token:
        raise Unauthenticated("Send a worker token: `X-Trace-Worker-Token: ilw_…`.")
    connection.scope[_KEY] = await access_of(connection).principals.authenticate_worker(token)  # type: ignore[literal-required]
    access_of(connection).lockout.proved(token)


async def capability_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    token = _presented(connection, CAPABILITY_HEADER)
    if not token:
        raise Unauthenticated("Send the capability token of the attempt: `X-Trace-Task-Capability`.")
    connection.scope[_KEY] = await access_of(connection).capabilities.verify(token)  # type: ignore[literal-required]
    access_of(connection).lockout.proved(token)


async def object_guard(connection: Connection, _handler: BaseRouteHandler) -> None:
    """Accepts a signed URL for exactly this request, or an object token whose grant covers it."""
    access, query = access_of(connection), query_of(connection)
    presented = _presented(connection, "authorization")
    if is_signed(query):
        if presented:
            raise Unauthenticated("A signed URL is already a credential; send no Authorization header with it.")
        asked = asked_object(connection, access.objects, query)
        await access.signed_urls.verify(asked.method, asked.key, query)
    else:
        grant = await _object_grant(access, presented)
        access.lockout.proved(presented)
        asked = asked_object(connection, access.objects, query)
        if not await grant.allows(asked.method, asked.uri):
            raise Forbidden("The object token does not grant access to this object.", code="outside_grant")
        connection.scope[_GRANT] = grant  # type: ignore[literal-required]
    connection.scope[_KEY] = asked  # type: ignore[literal-required]


async def result_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """Accepts a signed URL for exactly this result, which names its org, or a user of an org."""
    query = query_of(connection)
    if not is_signed(query):
        await user_guard(connection, handler)
        connection.scope[_ORG] = connection.scope[_KEY].org_id  # type: ignore[literal-required]
        return
    if _presented(connection, "authorization"):
        raise Unauthenticated("A signed URL is already a credential; send no Authorization header with it.")
    path = connection.scope["raw_path"].decode("ascii", errors="replace")
    await access_of(connection).result_urls.verify("GET", path.removeprefix(f"{RESULTS}/"), query)
    connection.scope[_ORG] = UUID(dict(query)["org"])  # type: ignore[literal-required]


def org_of_result(request: Request[Any, Any, Any]) -> UUID:
    org_id: UUID = request.scope[_ORG]  # type: ignore[literal-required]
    return org_id


async def _object_grant(access: Access, presented: str, *, to_write: bool = False) -> ObjectGrant:
    scheme, _, token = presented.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("Send an object token, `Authorization: Bearer …`, or use a signed URL.")
    return await access.object_tokens.verify(token.lstrip(" "), to_write=to_write)


SCHEMES: dict[Guard, str] = {
    user_guard: "apiKey",
    session_guard: "session",
    worker_guard: "workerToken",
    capability_guard: "capability",
    object_guard: "objectToken",
    result_guard: "apiKey",
}
"""The name of each credential in the OpenAPI documents."""


def principal_of(request: Request[Any, Any, Any]) -> Principal:
    principal: Principal = request.scope[_KEY]  # type: ignore[literal-required]
    return principal


def session_of(request: Request[Any, Any, Any]) -> Session:
    """Returns the session of a request that `session_guard` accepted."""
    session: Session = request.scope[_SESSION]  # type: ignore[literal-required]
    return session


def session_id_of(request: Request[Any, Any, Any]) -> str | None:
    """Returns the id of the caller's session, or None for an API key."""
    session: Session | None = request.scope.get(_SESSION)  # type: ignore[assignment]
    return None if session is None else session.session_id


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
    """Verifies an object token again after the body was read.

    The token expires with its lease, even during an upload.
    """
    if _GRANT in request.scope:
        await _object_grant(access_of(request), _presented(request, "authorization"), to_write=True)


def grant_of(request: Request[Any, Any, Any]) -> ObjectGrant:
    """Returns the grant of the object token. Signed URLs have no grant and cannot list objects."""
    grant: ObjectGrant = request.scope[_GRANT]  # type: ignore[literal-required]
    return grant
