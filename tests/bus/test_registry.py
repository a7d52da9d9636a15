"""The registry: validation, permissions, dry runs, the changelog and reverts."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from interlock.wire.access import KeyRequest, Role
from tests.support.bus_tenants import Tenant, tenant
from tests.support.system import System

ROUTE = {"target": "bot", "name": "say", "queue": "says", "dlq": "says-dlq"}
ACL = {"source": "billing", "target": "bot", "name": "say"}
LIMIT = {"target": "bot", "name": "say", "rate": 100}


async def settled(shared: System) -> Tenant:
    """Registers a producer, a target, and everything for one command between them."""
    owner = await tenant(shared)
    await owner.services("billing", "bot")
    await owner.put("routes", **ROUTE)
    await owner.put("acls", **ACL)
    await owner.put("limits", **LIMIT)
    return owner


async def versions(owner: Tenant) -> dict[str, int]:
    async with owner.system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select kind, version from interlock.bus_versions where org_id = $1", owner.org_id
        )
    return {row["kind"]: row["version"] for row in rows}


async def test_registered_entries_are_shown_with_defaults(shared: System) -> None:
    owner = await settled(shared)
    (route,) = (await owner.get("/v1/routes"))["routes"]
    assert route | {"changed_at": ""} == ROUTE | {
        "dag": None,
        "job": None,
        "dedupe_mode": "none",
        "dedupe_seconds": 300.0,
        "expected_drain_seconds": 300.0,
        "fairness": {"dominant_share": 0.8, "competing_share": 0.1, "minimum_volume": 20, "ban_seconds": 30.0},
        "expires_at": None,
        "changed_at": "",
        "changed_by": "ada",
    }
    assert await owner.get("/v1/routes/bot/say") == route
    (acl,) = (await owner.get("/v1/acls"))["acls"]
    assert (acl["source"], acl["sensitivity"]) == (f"{owner.org}/billing", "moderate")
    (limit,) = (await owner.get("/v1/limits"))["limits"]
    assert (limit["rate"], limit["window_seconds"], limit["enforcement"], limit["source"]) == (100, 1.0, "strict", None)
    assert [each["source"] for each in (await owner.get("/v1/services"))["services"]] == [
        f"{owner.org}/billing",
        f"{owner.org}/bot",
    ]


async def test_equal_request_changes_nothing_and_another_value_updates(shared: System) -> None:
    owner = await settled(shared)
    before = await versions(owner)
    again = await owner.put("acls", **ACL | {"source": f"{owner.org}/billing"})
    assert (again["action"], again["change_id"]) == ("none", None)
    assert await versions(owner) == before
    changed = await owner.put("acls", **ACL, sensitivity="critical")
    assert (changed["action"], changed["before"]["sensitivity"], changed["after"]["sensitivity"]) == (
        "update",
        "moderate",
        "critical",
    )
    assert await versions(owner) == before | {"acls": before["acls"] + 1}


async def test_dry_run_validates_and_changes_nothing(shared: System) -> None:
    owner = await settled(shared)
    before, log = await versions(owner), await owner.get("/v1/changes")
    reply = await owner.ask("POST", "/v1/routes?dry_run=true", json=ROUTE | {"dedupe_mode": "strict"})
    change = reply.json()
    assert (change["dry_run"], change["change_id"], change["action"]) == (True, None, "update")
    assert (change["before"]["dedupe_mode"], change["after"]["dedupe_mode"]) == ("none", "strict")
    assert (await owner.ask("POST", "/v1/services?dry_run=true", json={"name": "new"})).json()["action"] == "create"
    assert (await owner.ask("DELETE", "/v1/acls/bot/say/billing?dry_run=true")).json()["action"] == "delete"
    bad = {"target": "nobody", "name": "say", "queue": "q", "dlq": "d"}
    assert await owner.refusal("POST", "/v1/routes?dry_run=true", json=bad) == (404, "unknown_service")
    assert (await versions(owner), await owner.get("/v1/changes")) == (before, log)
    assert len((await owner.get("/v1/service-keys"))["keys"]) == 2


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"queue": "q"}, "bad_destination"),
        ({"queue": "q", "dlq": "q"}, "bad_destination"),
        ({"queue": "q", "dlq": "d", "job": "j"}, "bad_destination"),
        ({"queue": "q", "dlq": "d", "dag": "g"}, "bad_destination"),
        ({"job": "j", "dlq": "d"}, "bad_destination"),
        ({}, "bad_destination"),
        ({"dag": "feeds", "job": "load"}, "unknown_job"),
        ({"queue": "q", "dlq": "d", "expires_at": "2020-01-01T00:00:00Z"}, "expired_already"),
        ({"queue": "q", "dlq": "d", "expires_at": "2020-01-01T00:00:00"}, "invalid_request"),
        ({"queue": "Q", "dlq": "d"}, "invalid_request"),
        ({"queue": "q", "dlq": "d", "fairness": {"dominant_share": 0}}, "invalid_request"),
        ({"queue": "q", "dlq": "d", "dedupe_mode": "sometimes"}, "invalid_request"),
        ({"queue": "q", "dlq": "d", "arn": "x"}, "invalid_request"),
        ({"queue": "says", "dlq": "d"}, "queue_taken"),
        ({"queue": "q", "dlq": "says"}, "queue_taken"),
        ({"queue": "q", "dlq": "says-dlq"}, "queue_taken"),
        ({"queue": "says-dlq", "dlq": "d"}, "queue_taken"),
    ],
)
async def test_route_without_a_destination_or_to_a_taken_queue_is_refused(
    shared: System, entry: dict[str, Any], code: str
) -> None:
    owner = await settled(shared)
    await owner.services("other")
    _status, found = await owner.refusal("POST", "/v1/routes", json={"target": "other", "name": "hear"} | entry)
    assert found == code
    assert len((await owner.get("/v1/routes"))["routes"]) == 1


async def test_queue_takes_several_commands_with_one_dlq(shared: System) -> None:
    owner = await settled(shared)
    assert (await owner.put("routes", **ROUTE | {"name": "shout"}))["action"] == "create"
    other = ROUTE | {"name": "cry", "dlq": "cries-dlq"}
    assert await owner.refusal("POST", "/v1/routes", json=other) == (409, "queue_taken")


async def test_route_may_lead_to_a_job(shared: System) -> None:
    owner = await settled(shared)
    job = {"name": "load", "operator": "echo", "tasks": [1]}
    assert (await owner.ask("POST", "/v1/jobs", json=job)).status_code == 201
    change = await owner.put("routes", target="bot", name="load", job="load")
    assert (change["after"]["job"], change["after"]["queue"]) == ("load", None)


async def test_sources_and_targets_are_registered_services_of_the_org(shared: System) -> None:
    owner = await settled(shared)
    for entry in ({"source": "nobody"}, {"target": "nobody"}):
        assert await owner.refusal("POST", "/v1/acls", json=ACL | entry) == (404, "unknown_service")
    foreign = ACL | {"source": "somebody/billing"}
    assert await owner.refusal("POST", "/v1/acls", json=foreign) == (400, "foreign_source")
    assert await owner.refusal("POST", "/v1/limits", json=LIMIT | {"source": "nobody"}) == (404, "unknown_service")
    assert await owner.refusal("POST", "/v1/keys", json={"user": "x", "service": "nobody"}) == (404, "unknown_service")


async def test_limit_of_a_route_and_quota_of_a_source_are_separate(shared: System) -> None:
    owner = await settled(shared)
    await owner.put("limits", **LIMIT | {"source": "billing", "rate": 5, "enforcement": "shadow"})
    found = [(each["source"], each["rate"]) for each in (await owner.get("/v1/limits?target=bot"))["limits"]]
    assert found == [(None, 100), (f"{owner.org}/billing", 5)]
    assert (await owner.ask("DELETE", "/v1/limits/bot/say?source=billing")).json()["subject"] == "bot/say/billing"
    assert [each["source"] for each in (await owner.get("/v1/limits"))["limits"]] == [None]


async def test_every_change_and_every_revert_can_be_reverted(shared: System) -> None:
    owner = await settled(shared)
    made = await owner.put("limits", **LIMIT | {"name": "shout"})
    raised = await owner.put("limits", **LIMIT | {"name": "shout", "rate": 500})
    revert = f"/v1/changes/{raised['change_id']}/revert"
    tried = (await owner.ask("POST", f"{revert}?dry_run=true")).json()
    assert (tried["after"]["rate"], tried["dry_run"]) == (100, True)
    back = (await owner.ask("POST", revert)).json()
    assert (back["action"], back["after"]["rate"], back["reverts"]) == ("update", 100, raised["change_id"])
    assert await owner.refusal("POST", revert) == (409, "changed_since")
    assert await owner.refusal("POST", f"/v1/changes/{made['change_id']}/revert") == (409, "changed_since")
    forth = (await owner.ask("POST", f"/v1/changes/{back['change_id']}/revert")).json()
    assert forth["after"]["rate"] == 500
    gone = (await owner.ask("DELETE", "/v1/limits/bot/shout")).json()
    again = (await owner.ask("POST", f"/v1/changes/{gone['change_id']}/revert")).json()
    assert (again["action"], again["after"]) == ("create", gone["before"])
    assert await owner.refusal("POST", "/v1/changes/99999999999999/revert") == (404, "not_found")
    assert await owner.refusal("GET", f"/v1/changes/{2**70}") == (404, "not_found")


async def test_revert_of_a_creation_removes_the_entry(shared: System) -> None:
    owner = await settled(shared)
    (change,) = (await owner.get("/v1/changes?kind=acls"))["changes"]
    back = (await owner.ask("POST", f"/v1/changes/{change['change_id']}/revert")).json()
    assert (back["action"], back["after"]) == ("delete", None)
    assert (await owner.get("/v1/acls"))["acls"] == []


async def test_revert_is_validated_by_current_rules(shared: System) -> None:
    owner = await settled(shared)
    gone = (await owner.ask("DELETE", "/v1/acls/bot/say/billing")).json()
    assert (await owner.ask("DELETE", "/v1/services/billing")).status_code == 200
    assert await owner.refusal("POST", f"/v1/changes/{gone['change_id']}/revert") == (404, "unknown_service")


async def test_changelog_shows_author_time_and_content_newest_first(shared: System) -> None:
    owner = await settled(shared)
    await owner.put("routes", **ROUTE, expected_drain_seconds=60)
    changes = (await owner.get("/v1/changes"))["changes"]
    assert [(each["kind"], each["action"], each["subject"]) for each in changes] == [
        ("routes", "update", "bot/say"),
        ("limits", "create", "bot/say"),
        ("acls", "create", "bot/say/billing"),
        ("routes", "create", "bot/say"),
        ("services", "create", "bot"),
        ("keys", "create", "bot/hmac-v1"),
        ("services", "create", "billing"),
        ("keys", "create", "billing/hmac-v1"),
    ]
    assert {each["changed_by"] for each in changes} == {"ada"}
    assert (changes[0]["before"]["expected_drain_seconds"], changes[0]["after"]["expected_drain_seconds"]) == (300, 60)
    page = await owner.get("/v1/changes?limit=3")
    rest = await owner.get(f"/v1/changes?limit=100&cursor={page['next_cursor']}")
    assert page["changes"] + rest["changes"] == changes
    assert await owner.get(f"/v1/changes/{changes[0]['change_id']}") == changes[0]


async def test_unused_service_is_removed_with_its_keys(shared: System) -> None:
    owner = await settled(shared)
    key = await owner.service_key("billing")
    for service in ("billing", "bot"):
        assert await owner.refusal("DELETE", f"/v1/services/{service}") == (409, "service_in_use")
    await owner.ask("DELETE", "/v1/acls/bot/say/billing")
    assert (await owner.ask("DELETE", "/v1/services/billing")).status_code == 200
    assert (await shared.user("GET", "/v1/tenant-config", key=key)).status_code == 401
    assert await owner.refusal("GET", "/v1/services/billing") == (404, "unknown_service")
    assert [each["service"] for each in (await owner.get("/v1/service-keys"))["keys"]] == ["bot"]


async def test_pages_continue_at_the_cursor(shared: System) -> None:
    owner = await settled(shared)
    for number in range(5):
        await owner.put("routes", **ROUTE | {"name": f"say-{number}"})
        await owner.put("acls", **ACL | {"name": f"say-{number}"})
    for kind in ("routes", "acls"):
        names: list[str] = []
        for query in ("limit=4", "limit=4&target=bot"):
            cursor: str | None = None
            names.clear()
            while True:
                page = await owner.get(f"/v1/{kind}?{query}" + ("" if cursor is None else f"&cursor={cursor}"))
                names += [each["name"] for each in page[kind]]
                cursor = page["next_cursor"]
                if cursor is None:
                    break
            assert names == ["say", *(f"say-{number}" for number in range(5))]


async def test_trial_shows_every_check_and_its_fix(shared: System) -> None:
    owner = await settled(shared)
    good = await owner.ask("POST", "/v1/routes/test", json=ACL)
    assert good.json()["deliverable"] is True
    assert [check["check"] for check in good.json()["checks"]] == [
        "service",
        "key",
        "acl",
        "route",
        "destination",
        "limit",
    ]
    bad = (await owner.ask("POST", "/v1/routes/test", json=ACL | {"source": "nobody", "name": "shout"})).json()
    told = {check["check"]: check["detail"] for check in bad["checks"] if not check["ok"]}
    assert not bad["deliverable"]
    assert set(told) == {"service", "key", "acl", "route"}
    assert "interlock acl allow nobody bot shout" in told["acl"]


async def test_admins_change_acls_and_writers_change_routes(shared: System) -> None:
    owner = await settled(shared)
    principals = shared.kernel.access.principals
    made = await principals.create_key(KeyRequest(user="w", role=Role.WRITER), owner.org_id, granted_by=None)
    writer = Tenant(shared, owner.org, owner.org_id, made.key)
    assert (await writer.put("routes", **ROUTE, dedupe_mode="strict"))["changed_by"] == "w"
    assert (await writer.refusal("POST", "/v1/acls", json=ACL))[0] == 403
    assert (await writer.refusal("POST", "/v1/service-keys", json={"service": "bot"}))[0] == 403
    (acl,) = (await writer.get("/v1/changes?kind=acls"))["changes"]
    assert (await writer.refusal("POST", f"/v1/changes/{acl['change_id']}/revert"))[0] == 403
    service = Tenant(shared, owner.org, owner.org_id, await owner.service_key("billing"))
    assert (await service.refusal("GET", "/v1/routes"))[0] == 403


async def test_another_org_sees_and_changes_nothing(shared: System) -> None:
    owner, rival = await settled(shared), await tenant(shared)
    await owner.put("limits", source="billing", rate=100)
    (change, *_) = (await owner.get("/v1/changes"))["changes"]
    for kind in ("services", "routes", "acls", "limits", "changes"):
        assert (await rival.get(f"/v1/{kind}"))[kind] == []
    assert (await rival.get("/v1/service-keys"))["keys"] == []
    for method, path in [
        ("GET", "/v1/services/bot"),
        ("GET", "/v1/routes/bot/say"),
        ("DELETE", "/v1/services/bot"),
        ("DELETE", "/v1/routes/bot/say"),
        ("DELETE", "/v1/acls/bot/say/billing"),
        ("DELETE", "/v1/limits/bot/say"),
        ("DELETE", "/v1/limits?source=billing"),
        ("DELETE", "/v1/service-keys/bot/hmac-v1"),
        ("GET", f"/v1/changes/{change['change_id']}"),
        ("POST", f"/v1/changes/{change['change_id']}/revert"),
    ]:
        assert (await rival.refusal(method, path))[0] == 404, path
    assert (await owner.get("/v1/routes/bot/say"))["queue"] == "says"


async def test_concurrent_changes_are_serialised(shared: System) -> None:
    owner = await settled(shared)
    before = (await versions(owner))["limits"]
    await asyncio.gather(*(owner.put("limits", **LIMIT | {"rate": rate}) for rate in range(1, 21)))
    changes = (await owner.get("/v1/changes?kind=limits&limit=20"))["changes"]
    assert (await versions(owner))["limits"] == before + 20
    # Each change starts from the result of the previous one.
    for later, earlier in itertools.pairwise(changes):
        assert later["before"] == earlier["after"]
