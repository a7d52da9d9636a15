"""Users of an identity provider: their permissions are those in Postgres at the time of the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from interlock.cli.app import execute
from tests.conftest import copied
from tests.support.identity_provider import IdentityProvider, publishing
from tests.support.system import System, running


@pytest.fixture(scope="module")
async def provider() -> AsyncIterator[IdentityProvider]:
    async with publishing() as publisher:
        yield IdentityProvider(publisher)


@pytest.fixture(scope="module")
async def site(
    postgres_url: str, template: str, provider: IdentityProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    async with (
        copied(postgres_url, template) as url,
        running(url, tmp_path_factory.mktemp("members"), **provider.settings) as started,
    ):
        await started.kernel.access.principals.create_org("acme")
        yield started


async def allow(site: System, subject: str, role: str = "writer", **more: Any) -> dict[str, Any]:
    reply = await site.user("POST", "/v1/members", json={"subject": subject, "role": role} | more)
    assert reply.status_code == 200, reply.text
    member: dict[str, Any] = reply.json()
    return member


async def asked(
    site: System, token: str, path: str = "/v1/jobs", org: str | None = None, **more: Any
) -> httpx.Response:
    headers = {} if org is None else {"X-Interlock-Org": org}
    return await site.user(more.pop("method", "GET"), path, key=token, headers=headers, **more)


async def test_member_may_do_exactly_what_the_role_allows(site: System, provider: IdentityProvider) -> None:
    job = {"operator": "echo", "tasks": [{}]}
    for role, may in {"reader": (200, 403, 403), "writer": (200, 201, 403), "admin": (200, 201, 200)}.items():
        await allow(site, f"the-{role}", role)
        token = provider.token(f"the-{role}")
        statuses = (
            (await asked(site, token)).status_code,
            (await asked(site, token, method="POST", json=job)).status_code,
            (await asked(site, token, "/v1/members")).status_code,
        )
        assert statuses == may
        # No member reaches routes beyond one org, whatever the role.
        assert (await asked(site, token, "/v1/worker-tokens")).status_code == 403


async def test_roles_and_orgs_claimed_in_a_token_are_ignored(site: System, provider: IdentityProvider) -> None:
    await allow(site, "modest", "reader")
    token = provider.token(
        "modest", role="admin", roles=["admin"], scope="admin platform", org="acme", groups=["admin"]
    )
    assert (await asked(site, token, "/v1/members")).status_code == 403
    assert (await asked(site, token, org="acme")).json()["code"] == "not_a_member"


async def test_non_member_gets_403_and_invalid_token_gets_401(site: System, provider: IdentityProvider) -> None:
    stranger = await asked(site, provider.token("stranger"))
    assert (stranger.status_code, stranger.json()["code"]) == (403, "not_a_member")
    forged = await asked(site, provider.token("stranger", aud="other"))
    assert (forged.status_code, forged.json()["code"]) == (401, "bad_token")
    for junk in ("a.b.c", "...", ".", "eyJ.eyJ.sig"):
        assert (await asked(site, junk)).status_code == 401


async def test_role_change_applies_to_the_next_request(site: System, provider: IdentityProvider) -> None:
    token = provider.token("leaving")
    await allow(site, "leaving", "admin")
    assert (await asked(site, token, "/v1/members")).status_code == 200
    changed = await allow(site, "leaving", "reader")
    assert changed["role"] == "reader"
    assert (await asked(site, token, "/v1/members")).status_code == 403
    gone = await site.user("DELETE", "/v1/members?subject=leaving")
    assert (gone.status_code, gone.json()["subject"]) == (200, "leaving")
    assert (await asked(site, token)).status_code == 403
    assert (await site.user("DELETE", "/v1/members?subject=leaving")).status_code == 404


async def test_user_in_several_orgs_selects_one_by_header(site: System, provider: IdentityProvider) -> None:
    await allow(site, "both", "writer")
    await allow(site, "both", "reader", org="acme")
    token = provider.token("both")
    unsaid = await asked(site, token)
    assert (unsaid.status_code, unsaid.json()["code"]) == (400, "which_org")
    assert "acme, test" in unsaid.json()["detail"]
    job = {"operator": "echo", "name": "only-here", "tasks": [{}]}
    assert (await asked(site, token, org="acme", method="POST", json=job)).status_code == 403
    assert (await asked(site, token, org="test", method="POST", json=job)).status_code == 201
    assert (await asked(site, token, "/v1/jobs/only-here", org="test")).status_code == 200
    assert (await asked(site, token, "/v1/jobs/only-here", org="acme")).status_code == 404
    assert (await asked(site, token, org="elsewhere")).json()["code"] == "not_a_member"


async def test_org_header_does_not_change_the_org_of_an_api_key(site: System) -> None:
    assert (await asked(site, site.admin_key, org="test")).status_code == 200
    assert (await asked(site, site.admin_key, org="acme")).json()["code"] == "not_a_member"


async def test_admin_manages_members_of_its_own_org_only(site: System, provider: IdentityProvider) -> None:
    await allow(site, "boss", "admin", org="acme")
    boss = provider.token("boss")
    body = {"subject": "hired", "role": "admin"}
    assert (await asked(site, boss, "/v1/members", method="POST", json=body)).json()["org"] == "acme"
    for org, status in (("test", 403), ("none-such", 403), ("acme", 200)):
        assert (await asked(site, boss, "/v1/members", method="POST", json=body | {"org": org})).status_code == status
        assert (await asked(site, boss, f"/v1/members?org={org}")).status_code == status
    shown = (await asked(site, boss, "/v1/members")).json()["members"]
    assert {(m["subject"], m["org"], m["by"]) for m in shown} >= {("boss", "acme", "root"), ("hired", "acme", "boss")}
    assert {m["org"] for m in shown} == {"acme"}
    reply = await asked(site, boss, "/v1/members?subject=the-reader&org=test", method="DELETE")
    assert reply.status_code == 403


async def test_members_are_paginated(site: System) -> None:
    for n in range(5):
        await allow(site, f"page|{n}/{n}")
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await site.user("GET", "/v1/members", params={"limit": 2, "cursor": cursor})).json()
        seen += [member["subject"] for member in page["members"]]
        cursor = page["next_cursor"]
    assert seen == sorted(set(seen))
    assert [subject for subject in seen if subject.startswith("page|")] == [f"page|{n}/{n}" for n in range(5)]


async def test_same_subject_of_another_issuer_is_another_user(site: System, provider: IdentityProvider) -> None:
    await site.value(
        "insert into interlock.members (issuer, subject, org_id, role, by)"
        " values ('https://other', 'twin', $1, 'admin', '')",
        site.org_id,
    )
    assert (await asked(site, provider.token("twin"))).json()["code"] == "not_a_member"


async def test_rate_limit_applies_to_each_member_separately(site: System, provider: IdentityProvider) -> None:
    await allow(site, "one")
    await allow(site, "other")
    members = site.kernel.access.principals.members
    one, again, other = [await members.authenticate(provider.token(name), None) for name in ("one", "one", "other")]
    assert one == again
    assert one.key_id != other.key_id
    assert "one" not in one.key_id


async def test_without_an_identity_provider_there_are_no_members(shared: System, provider: IdentityProvider) -> None:
    assert (await asked(shared, provider.token("ada"))).status_code == 401
    reply = await shared.user("POST", "/v1/members", json={"subject": "ada"})
    assert (reply.status_code, reply.json()["code"]) == (409, "no_identity_provider")


@pytest.mark.parametrize(
    "body",
    [{}, {"subject": ""}, {"subject": "a" * 256}, {"subject": "a", "role": "owner"}, {"subject": "a\0"}],
    ids=str,
)
async def test_malformed_member_is_refused(site: System, body: dict[str, Any]) -> None:
    assert (await site.user("POST", "/v1/members", json=body)).status_code == 400


async def test_members_are_managed_from_the_command_line(
    site: System, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", site.gateway_url)

    async def run(*words: str, key: str = site.admin_key, org: str = "") -> tuple[int, str]:
        monkeypatch.setenv("INTERLOCK_API_KEY", key)
        with pytest.MonkeyPatch.context() as patch:
            if org:
                patch.setenv("INTERLOCK_ORG", org)
            code = await asyncio.to_thread(execute, list(words))
        return code, capsys.readouterr().out

    subject = "auth0|cli"
    assert await run("users", "allow", subject, "--role", "writer") == (0, f"{subject} is a member of test: writer.\n")
    assert (await run("users", "allow", subject, "--role", "admin", "--org", "acme"))[0] == 0
    token = provider.token(subject)
    assert (await run("job", "list", key=token))[0] == 1
    assert (await run("job", "list", key=token, org="test"))[0] == 0
    code, shown = await run("users", "members", "-o", "json", key=token, org="acme")
    assert code == 0
    assert subject in {member["subject"] for member in json.loads(shown)["members"]}
    assert "is no longer a member of test" in (await run("users", "disallow", subject))[1]
    assert (await run("job", "list", key=token, org="test"))[0] == 1
