"""Endpoints of the gateway that start, show and end sessions of the dashboard."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

import structlog
from litestar import Response, delete, get, post
from litestar.datastructures import Cookie
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody, QueryParameter
from litestar.response import Redirect

from interlock import __version__
from interlock.access.build import Access, access_of
from interlock.access.guards import headers_of, principal_of, session_guard, session_id_of, session_of, user_guard
from interlock.access.sessions import Session
from interlock.access.sign_in import HOME, LOGIN_COOKIE, LOGIN_SECONDS, IdentityProviderSignIn, Login
from interlock.errors import Conflict, Forbidden, InterlockError, Unauthenticated
from interlock.http.middleware import peer_of_scope
from interlock.http.request_limits import too_many_failures
from interlock.http.requests import Cursor, Http, Limit, settings_of
from interlock.wire.sessions import (
    KeySignIn,
    LinkSignIn,
    OrgChoice,
    OrgRole,
    SessionEntry,
    SessionPage,
    SessionView,
    SignInLink,
    SignInMethods,
)

log = structlog.get_logger()
T = TypeVar("T")

_OIDC: Final = "/v1/sign-in/oidc"
_TO_PROVIDER: Final = {302: ResponseSpec(None, description="To the identity provider", generate_examples=False)}
_TO_PAGE: Final = {302: ResponseSpec(None, description="To the dashboard", generate_examples=False)}
_Code = Annotated[str | None, QueryParameter(name="code", required=False, max_length=4_000)]
_State = Annotated[str | None, QueryParameter(name="state", required=False, max_length=4_000)]


@get("/v1/sign-in", summary="Ways to sign in to the dashboard")
async def sign_in_methods(request: Http) -> SignInMethods:
    by_provider = access_of(request).sessions.provider is not None
    return SignInMethods(key=True, oidc=by_provider, oidc_url=_OIDC if by_provider else None)


@post("/v1/sign-in/key", status_code=200, summary="Sign in to the dashboard with an API key")
async def sign_in_with_key(request: Http, data: JSONBody[KeySignIn]) -> Response[SessionView]:
    access = access_of(request)
    _require_same_origin(request)
    principal = await _guessed(request, data.key, access.principals.authenticate(data.key))
    return await _started(request, await access.sessions.start_of_key(principal))


@post("/v1/sign-in/link", status_code=200, summary="Sign in to the dashboard with a one-time link")
async def sign_in_with_link(request: Http, data: JSONBody[LinkSignIn]) -> Response[SessionView]:
    _require_same_origin(request)
    session = await _guessed(request, data.token, access_of(request).sessions.start_of_link(data.token))
    return await _started(request, session)


async def _guessed(request: Http, credential: str, proof: Coroutine[Any, Any, T]) -> T:
    """Applies the limit on invalid credentials to one in the body."""
    lockout, peer = access_of(request).lockout, peer_of_scope(request.scope)
    wait = lockout.wait(peer, [f"Bearer {credential}"])
    if wait is not None:
        proof.close()
        raise too_many_failures(wait)
    try:
        return await proof
    except Unauthenticated:
        lockout.failed(peer)
        raise


@get(
    _OIDC,
    status_code=302,
    summary="Sign in to the dashboard with the identity provider: navigate here",
    responses=_TO_PROVIDER,
)
async def sign_in_with_provider(
    request: Http, return_to: Annotated[str, QueryParameter(max_length=2_000)] = HOME
) -> Redirect:
    url, login = await _provider(access_of(request)).begin(return_to)
    return Redirect(url, status_code=302, cookies=[_login_cookie(request, login.cookie())], headers=_NO_STORE)


@get(
    "/v1/sign-in/callback",
    status_code=302,
    summary="Return from the identity provider; starts the session",
    responses=_TO_PAGE,
)
async def return_from_provider(request: Http, code: _Code = None, of_login: _State = None) -> Redirect:
    access, login = access_of(request), Login.of(request.cookies.get(LOGIN_COOKIE))
    cookies = [_login_cookie(request, "", forget=True)]
    try:
        provider = _provider(access)
        subject = await provider.finish(login, of_login, code)
        session = await access.sessions.start_of_member(provider.issuer.name, subject, None)
    except InterlockError as error:
        log.warning("sign_in.refused", code=error.code, reason=error.detail)
        return Redirect(f"{HOME}#sign-in-failed={error.code}", status_code=302, cookies=cookies, headers=_NO_STORE)
    await _end_previous(request)
    cookies.append(_cookie(access, session.cookie or ""))
    return Redirect(login.return_to if login else HOME, status_code=302, cookies=cookies, headers=_NO_STORE)


@get("/v1/session", guards=[session_guard], summary="The session of the caller; renews its cookie")
async def get_session(request: Http) -> Response[SessionView]:
    access, session = access_of(request), session_of(request)
    cookie = access.sessions.cookie_in(headers_of(request))
    fresh = await access.sessions.renewed(session, cookie or "")
    cookies = [] if fresh is None else [_cookie(access, fresh)]
    return Response(await _view(request, session), cookies=cookies, headers=_NO_STORE)


@post("/v1/session/org", guards=[session_guard], status_code=200, summary="Continue in another org of the user")
async def switch_org(request: Http, data: JSONBody[OrgChoice]) -> Response[SessionView]:
    made = await access_of(request).sessions.switch(session_of(request), data.org)
    return Response(
        await _view(request, made), cookies=[_cookie(access_of(request), made.cookie or "")], headers=_NO_STORE
    )


@delete("/v1/session", guards=[session_guard], status_code=204, summary="Sign out")
async def sign_out(request: Http) -> Response[None]:
    access = access_of(request)
    await access.sessions.end(session_of(request))
    return Response(None, status_code=204, cookies=[_cookie(access, "", forget=True)], headers=_NO_STORE)


@get(
    "/v1/sessions",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Sessions of the caller; for an admin, of the org",
)
async def list_sessions(request: Http, cursor: Cursor = None, limit: Limit = 100) -> SessionPage:
    return await access_of(request).sessions.page(principal_of(request), session_id_of(request), cursor, limit)


@delete(
    "/v1/sessions/{session_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    status_code=200,
    summary="Revoke a session; it ends immediately",
)
async def revoke_session(request: Http, session_id: FromPath[str]) -> SessionEntry:
    caller = principal_of(request)
    return await access_of(request).sessions.revoke(session_id, caller, current=session_id_of(request))


@post(
    "/v1/sign-in-links",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Create a link that signs in once, with the API key of the request",
)
async def create_link(request: Http) -> SignInLink:
    caller = principal_of(request)
    if session_id_of(request) is not None or caller.key_id.startswith("oidc-"):
        raise Forbidden("Only an API key can create a sign-in link; use `interlock open`.", code="not_a_key")
    token, expires_at = await access_of(request).sessions.link(caller.key_id)
    url = f"{settings_of(request).objects_base_url}{HOME}#sign-in={token}"
    return SignInLink(url=url, token=token, expires_at=expires_at)


_NO_STORE: Final = {"Cache-Control": "no-store"}


async def _started(request: Http, session: Session) -> Response[SessionView]:
    """Replies with a new session. A session that the browser had before ends, so that none can be planted in it."""
    await _end_previous(request)
    cookie = _cookie(access_of(request), session.cookie or "")
    return Response(await _view(request, session), cookies=[cookie], headers=_NO_STORE)


async def _end_previous(request: Http) -> None:
    sessions = access_of(request).sessions
    with contextlib.suppress(Unauthenticated):
        await sessions.end(await sessions.authenticate(sessions.cookie_in(headers_of(request))))


async def _view(request: Http, session: Session) -> SessionView:
    access, principal = access_of(request), session.principal
    orgs = await access.sessions.orgs_of(session)
    return SessionView(
        session_id=session.session_id,
        user=principal.user,
        org=principal.org,
        role=principal.role,
        scopes=sorted(principal.scopes),
        kind="key" if session.subject is None else "oidc",
        csrf=session.csrf,
        orgs=[OrgRole(org=org, role=role) for org, role in orgs],
        created_at=session.created_at,
        expires_at=session.expires_at,
        server_time=access.sessions.now(),
        version=__version__,
    )


def _cookie(access: Access, value: str, *, forget: bool = False) -> Cookie:
    sessions = access.sessions
    return Cookie(
        key=sessions.cookie_name,
        value=value,
        path="/",
        max_age=0 if forget else sessions.max_age,
        httponly=True,
        secure=sessions.secure,
        samesite="strict",
    )


def _login_cookie(request: Http, value: str, *, forget: bool = False) -> Cookie:
    """The state of a sign-in under way. The provider's redirect comes from another site, hence not `strict`."""
    return Cookie(
        key=LOGIN_COOKIE,
        value=value,
        path="/v1/sign-in",
        max_age=0 if forget else LOGIN_SECONDS,
        httponly=True,
        secure=access_of(request).sessions.secure,
        samesite="lax",
    )


def _provider(access: Access) -> IdentityProviderSignIn:
    if access.sessions.provider is None:
        raise Conflict(
            "Sign-in with an identity provider is not configured: set oidc_issuer and oidc_client_id, or sign in with "
            "an API key.",
            code="no_identity_provider",
        )
    return access.sessions.provider


def _require_same_origin(request: Http) -> None:
    """Rejects a sign-in that another site submits: it would start a session of another user in this browser.

    A browser sends at least one of the two headers with such a request. Programs send neither.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = {request.headers.get("host"), urlsplit(settings_of(request).objects_base_url).netloc}
    foreign = site not in (None, "same-origin", "none") or (
        site is None and origin is not None and urlsplit(origin).netloc not in own
    )
    if foreign:
        raise Forbidden("Sign in on the dashboard's own page.", code="csrf")


HANDLERS = [
    sign_in_methods,
    sign_in_with_key,
    sign_in_with_link,
    sign_in_with_provider,
    return_from_provider,
    get_session,
    switch_org,
    sign_out,
    list_sessions,
    revoke_session,
    create_link,
]
