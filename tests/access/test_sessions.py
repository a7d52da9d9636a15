"""Sessions of the dashboard: sign-in, rotation, revocation, CSRF, and the rights of the key or member behind them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from interlock.access.sessions import GRACE_SECONDS, PLAIN_COOKIE, ROTATE_SECONDS
from interlock.access.sign_in import local_path
from interlock.clock import ManualClock
from interlock.settings import Settings
from tests.conftest import copied
from tests.support.identity_provider import IdentityProvider, publishing
from tests.support.system import System, running

JOB = {"operator": "echo", "tasks": [{}]}


@asynccontextmanager
async def browser(system: System) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a cookie jar, like a browser on the dashboard's page."""
    headers = {"Sec-Fetch-Site": "same-origin"}
    async with httpx.AsyncClient(base_url=system.gateway_url, headers=headers) as client:
        yield client


async def sign_in(client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    reply = await client.post("/v1/sign-in/key", json={"key": key})
    assert reply.status_code == 200, reply.text
    view: dict[str, Any] = reply.json()
    return view


async def new_key(system: System, **request: Any) -> dict[str, Any]:
    reply = await system.user("POST", "/v1/keys", json={"user": "ada", "role": "writer"} | request)
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


# Sign-in by key


async def test_session_has_the_rights_of_its_key(shared: System) -> None:
    made = await new_key(shared, role="reader")
    async with browser(shared) as client:
        view = await sign_in(client, made["key"])
        assert (view["user"], view["role"], view["kind"]) == ("ada", "reader", "key")
        assert (await client.get("/v1/session")).json()["session_id"] == view["session_id"]
        assert (await client.get("/v1/jobs")).status_code == 200
        refused = await client.post("/v1/jobs", json=JOB, headers={"X-Interlock-CSRF": view["csrf"]})
        assert code(refused) == (403, "forbidden")


async def test_cookie_is_out_of_reach_of_scripts_and_of_other_sites(shared: System) -> None:
    async with browser(shared) as client:
        reply = await client.post("/v1/sign-in/key", json={"key": shared.admin_key})
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    assert "domain" not in cookie
    assert reply.headers["cache-control"] == "no-store"


async def test_wrong_key_starts_no_session(shared: System) -> None:
    async with browser(shared) as client:
        assert code(await client.post("/v1/sign-in/key", json={"key": "ilk_wrong"})) == (401, "unauthenticated")
        assert dict(client.cookies) == {}
        assert code(await client.get("/v1/session")) == (401, "session_missing")


async def test_guessing_keys_at_the_sign_in_is_limited(state_url: str, tmp_path: Any) -> None:
    async with running(state_url, tmp_path, auth_failures_per_second=0.005) as system, browser(system) as client:
        assert (await client.post("/v1/sign-in/key", json={"key": "ilk_guess"})).status_code == 401
        assert code(await client.post("/v1/sign-in/key", json={"key": "ilk_more"})) == (429, "too_many_failures")


async def test_sign_in_replaces_a_session_that_was_planted(shared: System) -> None:
    async with browser(shared) as attacker, browser(shared) as victim:
        await sign_in(attacker, (await new_key(shared))["key"])
        planted = attacker.cookies[PLAIN_COOKIE]
        victim.cookies.set(PLAIN_COOKIE, planted, domain="127.0.0.1")
        await sign_in(victim, shared.admin_key)
        assert victim.cookies[PLAIN_COOKIE] != planted
        assert code(await attacker.get("/v1/session")) == (401, "session_expired")


# CSRF


async def test_change_with_a_session_needs_its_csrf_token(shared: System) -> None:
    async with browser(shared) as client, browser(shared) as other:
        view, stranger = await sign_in(client, shared.admin_key), await sign_in(other, shared.admin_key)
        for headers in ({}, {"X-Interlock-CSRF": "wrong"}, {"X-Interlock-CSRF": stranger["csrf"]}):
            assert code(await client.post("/v1/jobs", json=JOB, headers=headers)) == (403, "csrf")
            assert code(await client.delete("/v1/session", headers=headers)) == (403, "csrf")
        accepted = await client.post("/v1/jobs", json=JOB, headers={"X-Interlock-CSRF": view["csrf"]})
        assert accepted.status_code == 201


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
async def test_another_site_cannot_sign_a_person_in(shared: System, headers: dict[str, str]) -> None:
    for path, body in (("key", {"key": shared.admin_key}), ("link", {"token": "x"})):
        reply = await shared.http.post(f"{shared.gateway_url}/v1/sign-in/{path}", json=body, headers=headers)
        assert code(reply) == (403, "csrf")
        assert "set-cookie" not in reply.headers


async def test_two_session_cookies_are_refused(shared: System) -> None:
    async with browser(shared) as client:
        await sign_in(client, shared.admin_key)
        mine = client.cookies[PLAIN_COOKIE]
    for line in (f"{PLAIN_COOKIE}={mine}; {PLAIN_COOKIE}=x", f"{PLAIN_COOKIE}=x; {PLAIN_COOKIE}={mine}"):
        reply = await shared.http.get(f"{shared.gateway_url}/v1/session", headers={"Cookie": line})
        assert code(reply) == (401, "session_missing")


# End


async def test_sign_out_ends_the_session_for_every_copy_of_the_cookie(shared: System) -> None:
    async with browser(shared) as client:
        view = await sign_in(client, shared.admin_key)
        cookie = client.cookies[PLAIN_COOKIE]
        assert (await client.delete("/v1/session", headers={"X-Interlock-CSRF": view["csrf"]})).status_code == 204
        assert PLAIN_COOKIE not in client.cookies
        client.cookies.set(PLAIN_COOKIE, cookie, domain="127.0.0.1")
        assert code(await client.get("/v1/jobs")) == (401, "session_expired")


async def test_revoking_the_key_ends_its_sessions(shared: System) -> None:
    made = await new_key(shared)
    async with browser(shared) as client:
        view = await sign_in(client, made["key"])
        await shared.user("DELETE", f"/v1/keys/{made['view']['key_id']}")
        action = await client.post("/v1/jobs", json=JOB, headers={"X-Interlock-CSRF": view["csrf"]})
        assert code(action) == (401, "session_expired")


async def test_admin_revokes_sessions_of_the_org_and_others_only_their_own(shared: System) -> None:
    made, foreign = await new_key(shared), await new_key(shared, user="bea")
    async with browser(shared) as ada, browser(shared) as bea:
        view, other = await sign_in(ada, made["key"]), await sign_in(bea, foreign["key"])
        listed = (await ada.get("/v1/sessions")).json()["sessions"]
        assert [(one["session_id"], one["current"]) for one in listed] == [(view["session_id"], True)]
        token = {"X-Interlock-CSRF": view["csrf"]}
        assert code(await ada.delete(f"/v1/sessions/{other['session_id']}", headers=token)) == (404, "not_found")
        ids = {one["session_id"] for one in (await shared.user("GET", "/v1/sessions")).json()["sessions"]}
        assert ids >= {view["session_id"], other["session_id"]}
        assert (await shared.user("DELETE", f"/v1/sessions/{other['session_id']}")).status_code == 200
        assert code(await bea.get("/v1/session")) == (401, "session_expired")


async def test_admin_of_another_org_sees_no_session(shared: System) -> None:
    await shared.user("POST", "/v1/orgs", json={"name": "elsewhere"})
    stranger = (await new_key(shared, role="admin", org="elsewhere"))["key"]
    async with browser(shared) as client:
        view = await sign_in(client, shared.admin_key)
        assert (await shared.user("GET", "/v1/sessions", key=stranger)).json()["sessions"] == []
        reply = await shared.user("DELETE", f"/v1/sessions/{view['session_id']}", key=stranger)
        assert code(reply) == (404, "not_found")
        assert (await client.get("/v1/session")).status_code == 200


async def test_unused_session_expires_and_a_used_one_does_in_the_end(still: System, clock: ManualClock) -> None:
    async with browser(still) as idle, browser(still) as busy:
        await sign_in(idle, still.admin_key)
        await sign_in(busy, still.admin_key)
        hours = still.kernel.settings.session_idle_hours - 1
        for _ in range(int(still.kernel.settings.session_hours / hours)):
            clock.advance(hours * 3600)
            assert (await busy.get("/v1/session")).status_code == 200
        assert code(await idle.get("/v1/session")) == (401, "session_expired")
        clock.advance(hours * 3600)
        assert code(await busy.get("/v1/session")) == (401, "session_expired")
        await still.pass_of("retention")
        assert await still.value("select count(*) from interlock.sessions") == 0


# Rotation


async def test_secret_is_rotated_while_the_page_is_used(still: System, clock: ManualClock) -> None:
    async with browser(still) as client:
        await sign_in(client, still.admin_key)
        first = client.cookies[PLAIN_COOKIE]
        await client.get("/v1/session")
        assert client.cookies[PLAIN_COOKIE] == first
        clock.advance(ROTATE_SECONDS + 1)
        await client.get("/v1/session")
        second = client.cookies[PLAIN_COOKIE]
        assert second != first
        # Requests that were under way with the former secret still succeed, and do not rotate it again.
        under_way = {"Cookie": f"{PLAIN_COOKIE}={first}"}
        reply = await still.http.get(f"{still.gateway_url}/v1/session", headers=under_way)
        assert (reply.status_code, "set-cookie" in reply.headers) == (200, False)


async def test_late_use_of_a_rotated_secret_revokes_the_session(still: System, clock: ManualClock) -> None:
    async with browser(still) as client:
        await sign_in(client, still.admin_key)
        stolen = client.cookies[PLAIN_COOKIE]
        clock.advance(ROTATE_SECONDS + 1)
        await client.get("/v1/session")
        clock.advance(GRACE_SECONDS + 1)
        headers = {"Cookie": f"{PLAIN_COOKIE}={stolen}"}
        thief = await still.http.get(f"{still.gateway_url}/v1/jobs", headers=headers)
        assert code(thief) == (401, "session_expired")
        assert code(await client.get("/v1/session")) == (401, "session_expired")


# Links


async def test_link_signs_in_once(shared: System) -> None:
    link = (await shared.user("POST", "/v1/sign-in-links")).json()
    assert link["url"] == f"{shared.gateway_url}/ui/#sign-in={link['token']}"
    async with browser(shared) as client, browser(shared) as second:
        reply = await client.post("/v1/sign-in/link", json={"token": link["token"]})
        assert (reply.status_code, reply.json()["user"]) == (200, "root")
        assert code(await second.post("/v1/sign-in/link", json={"token": link["token"]})) == (401, "link_used")


async def test_link_expires(still: System, clock: ManualClock) -> None:
    link = (await still.user("POST", "/v1/sign-in-links")).json()
    clock.advance(still.kernel.settings.sign_in_link_seconds + 1)
    async with browser(still) as client:
        assert code(await client.post("/v1/sign-in/link", json={"token": link["token"]})) == (401, "link_used")


async def test_session_cannot_create_a_link_that_outlives_it(shared: System) -> None:
    async with browser(shared) as client:
        view = await sign_in(client, shared.admin_key)
        reply = await client.post("/v1/sign-in-links", headers={"X-Interlock-CSRF": view["csrf"]})
        assert code(reply) == (403, "not_a_key")


# Identity provider


@pytest.fixture(scope="module")
async def provider() -> AsyncIterator[IdentityProvider]:
    async with publishing() as publisher:
        found = IdentityProvider(publisher)
        document = json.loads(publisher.answers["/.well-known/openid-configuration"].body)
        urls = {"authorization_endpoint": f"{found.url}/authorize", "token_endpoint": f"{found.url}/token"}
        publisher.says("/.well-known/openid-configuration", document | urls)
        yield found


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, provider: IdentityProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    settings = provider.settings | {"oidc_client_id": "dashboard", "oidc_client_secret": "s3cret"}
    async with (
        copied(postgres_url, template) as url,
        running(url, tmp_path_factory.mktemp("sign-in"), **settings) as started,
    ):
        await started.user("POST", "/v1/members", json={"subject": "grace", "role": "writer"})
        await started.user("POST", "/v1/orgs", json={"name": "acme"})
        yield started


async def at_provider(client: httpx.AsyncClient, return_to: str = "/ui/runs?state=Failed") -> dict[str, str]:
    """Follows the link to the provider. Returns the parameters that it gets."""
    reply = await client.get("/v1/sign-in/oidc", params={"return_to": return_to})
    assert reply.status_code == 302, reply.text
    return {name: values[0] for name, values in parse_qs(urlsplit(reply.headers["location"]).query).items()}


def answers(provider: IdentityProvider, asked: dict[str, str], subject: str, **claims: Any) -> None:
    token = provider.token(subject, **({"aud": "dashboard", "nonce": asked["nonce"]} | claims))
    provider.publisher.says("/token", {"id_token": token, "access_token": "x", "token_type": "Bearer"})


async def back(client: httpx.AsyncClient, asked: dict[str, str]) -> str:
    reply = await client.get("/v1/sign-in/callback", params={"code": "c0de", "state": asked["state"]})
    assert reply.status_code == 302, reply.text
    return str(reply.headers["location"])


async def test_member_signs_in_with_the_identity_provider(site: System, provider: IdentityProvider) -> None:
    async with browser(site) as client:
        assert (await client.get("/v1/sign-in")).json()["oidc"] is True
        asked = await at_provider(client)
        assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
        assert asked["redirect_uri"] == f"{site.gateway_url}/v1/sign-in/callback"
        answers(provider, asked, "grace")
        assert await back(client, asked) == "/ui/runs?state=Failed"
        view = (await client.get("/v1/session")).json()
        assert (view["user"], view["kind"], view["role"]) == ("grace", "oidc", "writer")
        await site.user("DELETE", "/v1/members?subject=grace")
        assert code(await client.get("/v1/jobs")) == (401, "session_expired")
        await site.user("POST", "/v1/members", json={"subject": "grace", "role": "writer"})


@pytest.mark.parametrize(
    ("subject", "claims", "why"),
    [
        ("grace", {"nonce": "of another sign-in"}, "bad_token"),
        ("grace", {"nonce": None}, "bad_token"),
        ("grace", {"aud": "interlock"}, "bad_token"),
        ("grace", {"exp": 1}, "token_expired"),
        ("nobody", {}, "not_a_member"),
    ],
)
async def test_unfit_id_token_starts_no_session(
    site: System, provider: IdentityProvider, subject: str, claims: dict[str, Any], why: str
) -> None:
    async with browser(site) as client:
        asked = await at_provider(client)
        answers(provider, asked, subject, **claims)
        assert await back(client, asked) == f"/ui/#sign-in-failed={why}"
        assert PLAIN_COOKIE not in client.cookies


async def test_sign_in_ends_only_in_the_browser_that_began_it(site: System, provider: IdentityProvider) -> None:
    async with browser(site) as attacker, browser(site) as victim:
        asked = await at_provider(attacker)
        answers(provider, asked, "grace")
        assert await back(victim, asked) == "/ui/#sign-in-failed=login_expired"
        await at_provider(victim)
        assert await back(victim, asked) == "/ui/#sign-in-failed=login_expired"
        assert PLAIN_COOKIE not in victim.cookies


async def test_provider_that_refuses_signs_nobody_in(site: System) -> None:
    async with browser(site) as client:
        asked = await at_provider(client)
        reply = await client.get("/v1/sign-in/callback", params={"error": "access_denied", "state": asked["state"]})
        assert reply.headers["location"] == "/ui/#sign-in-failed=provider_refused"


async def test_member_of_two_orgs_changes_to_the_other_one(site: System, provider: IdentityProvider) -> None:
    for body in ({"subject": "lin", "role": "reader"}, {"subject": "lin", "role": "admin", "org": "acme"}):
        assert (await site.user("POST", "/v1/members", json=body)).status_code == 200
    async with browser(site) as client:
        asked = await at_provider(client)
        answers(provider, asked, "lin")
        await back(client, asked)
        view = (await client.get("/v1/session")).json()
        assert [one["org"] for one in view["orgs"]] == ["acme", "test"]
        former, headers = client.cookies[PLAIN_COOKIE], {"X-Interlock-CSRF": view["csrf"]}
        moved = (await client.post("/v1/session/org", json={"org": "test"}, headers=headers)).json()
        assert (moved["org"], moved["role"]) == ("test", "reader")
        again = await site.http.get(f"{site.gateway_url}/v1/jobs", headers={"Cookie": f"{PLAIN_COOKIE}={former}"})
        assert code(again) == (401, "session_expired")
        headers = {"X-Interlock-CSRF": moved["csrf"]}
        refused = await client.post("/v1/session/org", json={"org": "nowhere"}, headers=headers)
        assert code(refused) == (403, "not_a_member")


async def test_without_an_identity_provider_there_is_only_the_key(shared: System) -> None:
    async with browser(shared) as client:
        assert (await client.get("/v1/sign-in")).json() == {"key": True, "oidc": False, "oidc_url": None}
        assert code(await client.get("/v1/sign-in/oidc")) == (409, "no_identity_provider")


@pytest.mark.parametrize(
    "path", ["https://evil.example", "//evil.example", "/v1/jobs", "/ui/../v1", "/ui/\\evil", "/ui/\r\nX: 1", "ui/"]
)
def test_sign_in_returns_only_to_the_dashboard(path: str) -> None:
    assert local_path(path) == "/ui/"


def test_cookie_is_secure_off_loopback(tmp_path: Any) -> None:
    from interlock.access.principals import Members
    from interlock.access.sessions import Sessions

    database: Any = None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gateway": "127.0.0.1:7070"}, PLAIN_COOKIE),
        ({"gateway": "10.0.0.1:7070"}, "__Host-interlock"),
        ({"gateway": "127.0.0.1:7070", "objects_public_url": "https://lock.example"}, "__Host-interlock"),
    ]
    for given, name in cases:
        sessions = Sessions(database, Settings(dir=tmp_path, **given), Members(database, None), None)
        assert (sessions.cookie_name, sessions.secure) == (name, name != PLAIN_COOKIE)
