"""Permissions: orgs see only their own data, keys are limited to their scopes, and workers to their runtimes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from interlock.apps import gateway
from interlock.clock import ManualClock
from tests.support.code_bundles import upload, zipped
from tests.support.dags import deploy
from tests.support.system import System, fence

Route = tuple[str, str]

READ = {"jobs:read", "tasks:read", "queues:read", "query:read", "registry:read"}
WRITE = {"jobs:write", "tasks:write", "bundles:write", "registry:write"}
ROLES = {"reader": READ, "writer": READ | WRITE, "admin": READ | WRITE | {"admin"}}
OPEN = {("GET", "/healthz")}
SIGN_IN = {
    ("GET", "/v1/sign-in"),
    *(("POST", f"/v1/sign-in/{how}") for how in ("key", "link")),
    *(("GET", f"/v1/sign-in/{step}") for step in ("oidc", "callback")),
    *((method, "/v1/session") for method in ("GET", "DELETE")),
    ("POST", "/v1/session/org"),
    ("GET", "/v1/live"),
}
"""Routes that start a session, or that need one in place of a key: test_sessions.py tests them."""
FILES = {("GET", "/"), ("GET", "/ui"), ("GET", "/ui/{file}")}
"""Files without data: tests/http/test_dashboard_files.py tests them."""


def routes() -> dict[Route, str | None]:
    """Returns every route of the gateway, with the scope that it requires."""
    return {
        (method, re.sub(r":\w+}", "}", path)): handler.opt.get("scope")
        for handler in gateway.HANDLERS
        for path in handler.paths
        for method in handler.http_methods
    }


async def key(system: System, *, by: str | None = None, **request: Any) -> str:
    reply = await system.user("POST", "/v1/keys", json={"user": "someone"} | request, key=by)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["key"])


async def worker_token(system: System, **request: Any) -> str:
    reply = await system.user("POST", "/v1/worker-tokens", json={"name": "w"} | request)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["token"])


# Orgs


SECRET_DAG = """
name: secret-dag
jobs:
  - {name: feed, operator: echo, activation: source, source: {kind: webhook}, outputs: [blocks]}
  - {name: derive, operator: echo, inputs: [{from: {job: feed, output: blocks}}], outputs: [facts]}
publish:
  secret-data: {from: {job: derive, output: facts}}
"""
_RANGE = {"start": 0, "end": 9}
BODIES: dict[Route, Any] = {
    ("POST", "/v1/uploads"): {},
    ("POST", "/v1/jobs/{job}/tasks"): {"tasks": [1]},
    ("POST", "/v1/jobs/{job}/rerun"): {},
    ("POST", "/v1/dags/{dag}/pause"): {},
    ("POST", "/v1/jobs/{job}/exports"): {"format": "jsonl"},
    ("POST", "/v1/dags/{dag}/rollback"): {},
    ("POST", "/v1/dags/{dag}/purge"): {"version": "0123abcd"},
    ("POST", "/v1/dags/{dag}/jobs/{job}/events"): {"events": [{"payload": {}}]},
    ("POST", "/v1/dags/{dag}/jobs/{job}/secret"): {},
    ("POST", "/v1/dags/{dag}/jobs/{job}/backfills"): _RANGE,
    ("POST", "/v1/datasets/{dataset}/invalidate"): _RANGE | {"reason": "a stranger's"},
    ("POST", "/v1/webhooks/{webhook}/rotate"): {},
    ("POST", "/v1/webhooks/{webhook}/redrive"): {},
}


@dataclass
class TwoOrgs:
    """A system in which one org has one of everything, and a second has an admin key."""

    system: System
    stranger: str
    task_id: str
    run_id: str
    job_id: str
    key_id: str
    token_id: str
    backfill: str
    publish_id: str
    query_id: str
    delivery_id: str

    async def ask(self, route: Route, body: Any = None) -> httpx.Response:
        method, path = route
        if "backfills" in path:
            path = path.replace("{run_id}", self.backfill)
        for name in ("task_id", "run_id", "key_id", "token_id", "publish_id", "query_id", "delivery_id"):
            path = path.replace(f"{{{name}}}", getattr(self, name))
        path = path.replace("{job}", "derive" if "{dag}" in path else "secret-job").replace("{queue}", "platform")
        path = (
            path.replace("{dag}", "secret-dag").replace("{dataset}", "secret-data").replace("{bundle}", "secret-bundle")
        )
        path = path.replace("{webhook}", "secret-webhook").replace("{index}", "0").replace("{export_id}", str(uuid4()))
        query = "?start=0&end=9" if "{job}/explain" in route[1] else ""
        return await self.system.user(method, path + query, key=self.stranger, json=body or BODIES.get(route))


@pytest.fixture(scope="module")
async def two(shared: System) -> TwoOrgs:
    name = f"second-{uuid4().hex[:8]}"
    assert (await shared.user("POST", "/v1/orgs", json={"name": name})).status_code == 201
    stranger = await key(shared, role="admin", org=name)
    accepted = await shared.submit([{"secret": "payload"}], name="secret-job")
    (task_id,) = await shared.task_ids(accepted["run_id"])
    keys = (await shared.user("GET", "/v1/keys")).json()["keys"]
    tokens = (await shared.user("GET", "/v1/worker-tokens")).json()["tokens"]
    await deploy(shared, SECRET_DAG)
    await upload(shared, zipped(), "secret-bundle")
    backfill = await shared.user("POST", "/v1/dags/secret-dag/jobs/derive/backfills", json={"start": 0, "end": 9})
    publish_id = await shared.value(
        "insert into interlock.buffer_publishes (org_id, task_id, attempt, dataset_uuid, dataset_version, batch_uri,"
        " record_count, status) values ($1, $2, 1, $2, $2, 'secret-batch', 1, 'Refused') returning publish_id",
        shared.org_id,
        task_id,
    )
    query_id = await shared.value(
        "insert into interlock.query_audit (org_id, user_name, mode, sql_sha256, outcome)"
        " values ($1, 'secret-user', 'interactive', '', 'Completed') returning query_id",
        shared.org_id,
    )
    hook = {"name": "secret-webhook", "url": "https://hooks.example/secret-path"}
    assert (await shared.user("POST", "/v1/webhooks", json=hook)).status_code == 201
    delivery = (await shared.user("POST", "/v1/webhooks/secret-webhook/test")).json()
    return TwoOrgs(
        system=shared,
        delivery_id=delivery["delivery_id"],
        publish_id=str(publish_id),
        query_id=str(query_id),
        stranger=stranger,
        task_id=task_id,
        run_id=accepted["run_id"],
        job_id=accepted["job_id"],
        key_id=keys[0]["key_id"],
        token_id=tokens[0]["token_id"],
        backfill=backfill.json()["backfill"]["run_id"],
    )


HIDDEN: list[Route] = [
    ("GET", "/v1/jobs/{job}"),
    ("GET", "/v1/jobs/{job}/runs"),
    ("GET", "/v1/jobs/{job}/tasks"),
    ("GET", "/v1/runs/{run_id}"),
    ("POST", "/v1/jobs/{job}/pause"),
    ("POST", "/v1/jobs/{job}/tasks"),
    ("POST", "/v1/jobs/{job}/close"),
    ("POST", "/v1/jobs/{job}/resume"),
    ("POST", "/v1/jobs/{job}/cancel"),
    ("DELETE", "/v1/jobs/{job}"),
    ("GET", "/v1/jobs/{job}/tasks/{index}"),
    ("GET", "/v1/results/{run_id}/{index}"),
    ("GET", "/v1/jobs/{job}/receipt"),
    ("POST", "/v1/jobs/{job}/rerun"),
    ("POST", "/v1/jobs/{job}/exports"),
    ("GET", "/v1/jobs/{job}/exports/{export_id}"),
    ("POST", "/v1/runs/{run_id}/cancel"),
    ("GET", "/v1/tasks/{task_id}"),
    ("GET", "/v1/tasks/{task_id}/attempts"),
    ("GET", "/v1/tasks/{task_id}/explain"),
    ("GET", "/v1/tasks/{task_id}/logs"),
    ("GET", "/v1/jobs/{job}/logs"),
    ("POST", "/v1/tasks/{task_id}/cancel"),
    ("POST", "/v1/tasks/{task_id}/retry"),
    ("DELETE", "/v1/keys/{key_id}"),
    ("GET", "/v1/dags/{dag}"),
    ("GET", "/v1/dags/{dag}/versions"),
    ("GET", "/v1/dags/{dag}/document"),
    ("POST", "/v1/dags/{dag}/rollback"),
    ("POST", "/v1/dags/{dag}/cutover"),
    ("POST", "/v1/dags/{dag}/purge"),
    ("POST", "/v1/dags/{dag}/pause"),
    ("POST", "/v1/dags/{dag}/resume"),
    ("DELETE", "/v1/dags/{dag}"),
    ("GET", "/v1/dags/{dag}/sources"),
    ("GET", "/v1/dags/{dag}/jobs/{job}/explain"),
    ("POST", "/v1/dags/{dag}/jobs/{job}/events"),
    ("POST", "/v1/dags/{dag}/jobs/{job}/secret"),
    ("POST", "/v1/dags/{dag}/jobs/{job}/backfills"),
    ("GET", "/v1/backfills/{run_id}"),
    ("POST", "/v1/backfills/{run_id}/pause"),
    ("POST", "/v1/backfills/{run_id}/resume"),
    ("POST", "/v1/backfills/{run_id}/cancel"),
    ("GET", "/v1/datasets/{dataset}"),
    ("GET", "/v1/datasets/{dataset}/partitions"),
    ("GET", "/v1/datasets/{dataset}/events"),
    ("GET", "/v1/datasets/{dataset}/lineage"),
    ("POST", "/v1/datasets/{dataset}/invalidate"),
    ("GET", "/v1/buffers/{publish_id}"),
    ("POST", "/v1/buffers/{publish_id}/redrive"),
    ("GET", "/v1/queries/{query_id}"),
    ("GET", "/v1/bundles/{bundle}"),
    ("DELETE", "/v1/bundles/{bundle}"),
    ("GET", "/v1/webhooks/{webhook}"),
    ("DELETE", "/v1/webhooks/{webhook}"),
    ("POST", "/v1/webhooks/{webhook}/pause"),
    ("POST", "/v1/webhooks/{webhook}/resume"),
    ("POST", "/v1/webhooks/{webhook}/rotate"),
    ("POST", "/v1/webhooks/{webhook}/test"),
    ("GET", "/v1/webhooks/{webhook}/deliveries"),
    ("GET", "/v1/webhooks/{webhook}/deliveries/{delivery_id}"),
    ("POST", "/v1/webhooks/{webhook}/redrive"),
]
"""Routes to resources of one org: they do not exist for another org."""

EMPTY: list[Route] = [
    ("GET", "/v1/jobs"),
    ("GET", "/v1/tasks"),
    ("GET", "/v1/keys"),
    ("GET", "/v1/runs"),
    ("GET", "/v1/dags"),
    ("GET", "/v1/datasets"),
    ("GET", "/v1/backfills"),
    ("GET", "/v1/pauses"),
    ("GET", "/v1/buffers"),
    ("GET", "/v1/bundles"),
    ("GET", "/v1/queries"),
    ("GET", "/v1/relations"),
    ("GET", "/v1/webhooks"),
    ("GET", "/v1/replays"),
    ("GET", "/v1/alerts"),
    ("GET", "/v1/alert-channels"),
    ("GET", "/v1/route-health"),
]
"""Lists that contain only the resources of the caller's org."""

FILTERED: list[Route] = [("POST", "/v1/tasks/cancel"), ("POST", "/v1/tasks/redrive")]

PLATFORM: list[Route] = [
    ("GET", "/v1/queues/{queue}/dead-letters"),
    ("POST", "/v1/queues/{queue}/redrive"),
    ("GET", "/v1/worker-tokens"),
    ("POST", "/v1/worker-tokens"),
    ("DELETE", "/v1/worker-tokens/{token_id}"),
    ("POST", "/v1/orgs"),
    ("GET", "/v1/orgs/{org}/operators"),
    ("POST", "/v1/orgs/{org}/operators"),
    ("GET", "/v1/signing-keys"),
    ("POST", "/v1/signing-keys/rotate"),
    ("GET", "/v1/operations/alerts"),
    ("POST", "/v1/operations/alerts/{alert_id}/resolve"),
    ("GET", "/metrics"),
]
"""Routes beyond any org: only the platform scope reaches them."""

OF_ALL: list[Route] = [*(("GET", path) for path in ("/v1/queues", "/v1/workers", "/v1/receipt-keys", "/healthz"))]
"""Infrastructure that orgs share: counts, names of workers and public keys, and no data about the work of an org."""

OWN: list[Route] = [
    *(("POST", path) for path in ("/v1/jobs", "/v1/uploads", "/v1/keys", "/v1/dags", "/v1/bundles", "/v1/webhooks"))
]
OWN += [("PUT", "/v1/alert-channels/{event}"), ("POST", "/v1/replays")]
"""Routes that create something in the caller's own org."""

HOOK: Route = ("POST", "/v1/hooks/{hook_id}")
"""Requires no API key: the hook has its own secret."""

OBJECTS: list[Route] = [
    ("GET", "/v1/objects"),
    *((method, "/v1/objects/{key}") for method in ("GET", "HEAD", "PUT", "POST", "DELETE")),
]
"""Routes for holders of signed URLs and object tokens: no API key of any org opens an object."""


MEMBERS: list[Route] = [(method, "/v1/members") for method in ("GET", "POST", "DELETE")]
"""Members exist only with an identity provider: test_members.py tries these routes with another org's admin."""


REPLAYS: list[Route] = [("GET", "/v1/replays/{replay_id}"), ("POST", "/v1/replays/{replay_id}/cancel")]
"""Routes that tests/bus/test_replay.py tries with another org's admin."""

SECRETS: list[Route] = [("GET", "/v1/secrets"), ("PUT", "/v1/secrets/{secret}"), ("DELETE", "/v1/secrets/{secret}")]
"""Routes that test_secrets.py tries with another org's admin."""

REGISTRY: list[Route] = [
    *(("GET", f"/v1/{kind}") for kind in ("services", "routes", "acls", "limits", "service-keys", "changes")),
    *(("POST", f"/v1/{kind}") for kind in ("services", "routes", "acls", "limits", "service-keys", "routes/test")),
    *((method, "/v1/services/{service}") for method in ("GET", "DELETE")),
    *((method, "/v1/routes/{target}/{name}") for method in ("GET", "DELETE")),
    ("DELETE", "/v1/acls/{target}/{name}/{source}"),
    ("DELETE", "/v1/limits"),
    ("DELETE", "/v1/limits/{target}/{name}"),
    ("DELETE", "/v1/service-keys/{service}/{version_id}"),
    ("GET", "/v1/changes/{change_id}"),
    ("POST", "/v1/changes/{change_id}/revert"),
]
"""Routes that tests/bus/test_registry.py tries with another org's admin."""

BULK: list[Route] = [
    *((method, "/v1/bulk-operations") for method in ("GET", "POST")),
    ("GET", "/v1/bulk-operations/{operation_id}"),
    ("POST", "/v1/bulk-operations/{operation_id}/cancel"),
]
"""Routes that tests/jobs/test_bulk_operations.py tries with another org's admin."""

OVERVIEW: list[Route] = [
    *(("GET", f"/v1/{what}") for what in ("overview", "failing-jobs", "failures", "search")),
    *(("GET", f"/v1/runs/{{run_id}}/{what}") for what in ("failures", "timeline", "durations")),
]
OVERVIEW += [("POST", "/v1/query")]
"""Routes that other tests try with another org's admin: tests/tasks/test_overview.py, tests/query/test_queries.py."""

SESSIONS: list[Route] = [
    *SIGN_IN,
    ("GET", "/v1/sessions"),
    ("DELETE", "/v1/sessions/{session_id}"),
    ("POST", "/v1/sign-in-links"),
]
"""Routes that test_sessions.py tries with another org's admin."""

SENDING: list[Route] = [
    ("POST", "/v1/commands"),
    ("GET", "/v1/commands"),
    ("GET", "/v1/commands/{command_id}"),
    ("GET", "/v1/tenant-config"),
]
"""Routes for keys of services, which act only for their own org.

tests/bus/test_path.py, tests/bus/test_fates.py and tests/bus/test_service_keys.py test them.
"""

INBOX: list[Route] = [
    ("GET", "/v1/inbox/{queue}/dead-letters"),
    *(("POST", f"/v1/inbox/{{queue}}/{what}") for what in ("receive", "extend", "ack", "nack", "redrive", "discard")),
]
"""Routes for keys of services: tests/bus/test_inbox.py tries them with keys of another service and another org."""


def test_every_route_of_the_gateway_is_tried_with_another_orgs_key() -> None:
    elsewhere = {
        HOOK,
        *OBJECTS,
        *MEMBERS,
        *INBOX,
        *REPLAYS,
        *SECRETS,
        *REGISTRY,
        *SENDING,
        *SESSIONS,
        *FILES,
        *BULK,
        *OVERVIEW,
    }
    assert {*HIDDEN, *EMPTY, *FILTERED, *PLATFORM, *OF_ALL, *OWN} | elsewhere == set(routes())


@pytest.mark.parametrize("route", HIDDEN, ids=" ".join)
async def test_objects_of_another_org_are_not_found(two: TwoOrgs, route: Route) -> None:
    reply = await two.ask(route)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found"), reply.text
    assert "payload" not in reply.text
    assert (await two.system.task(two.task_id))["status"] == "Queued"


@pytest.mark.parametrize("route", EMPTY + OF_ALL, ids=" ".join)
async def test_objects_of_another_org_are_not_listed(two: TwoOrgs, route: Route) -> None:
    reply = await two.ask(route)
    assert reply.status_code == 200, reply.text
    hidden = [two.task_id, two.run_id, two.job_id, two.key_id, two.backfill, "secret-", "payload"]
    assert [text for text in hidden if text in reply.text] == []


@pytest.mark.parametrize("query", ["job=secret-job", "job={job_id}", "run={run_id}"])
async def test_no_filter_finds_tasks_of_another_org(two: TwoOrgs, query: str) -> None:
    query = query.format(job_id=two.job_id, run_id=two.run_id)
    reply = await two.system.user("GET", f"/v1/tasks?{query}", key=two.stranger)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("route", FILTERED, ids=" ".join)
async def test_no_filter_changes_tasks_of_another_org(two: TwoOrgs, route: Route) -> None:
    for where in ({"job": "secret-job"}, {"job": two.job_id}, {"run": two.run_id}):
        for dry_run in (True, False):
            reply = await two.ask(route, where | {"dry_run": dry_run})
            assert (reply.status_code, reply.json()["code"]) == (404, "not_found"), reply.text
    assert (await two.system.task(two.task_id))["status"] == "Queued"


@pytest.mark.parametrize("route", PLATFORM, ids=" ".join)
async def test_org_admin_has_no_access_to_platform_routes(two: TwoOrgs, route: Route) -> None:
    reply = await two.ask(route, {"name": "x"})
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    assert "'platform'" in reply.json()["detail"]


@pytest.mark.parametrize("route", OBJECTS, ids=" ".join)
async def test_api_key_gives_no_access_to_objects(two: TwoOrgs, route: Route) -> None:
    for api_key in (two.stranger, two.system.admin_key):
        path = route[1].replace("{key}", "dataset/a")
        reply = await two.system.user(route[0], f"{path}?prefix=dataset/", key=api_key)
        assert reply.status_code == 401


async def test_cursor_of_another_org_shows_nothing(two: TwoOrgs) -> None:
    await two.system.submit([1, 2, 3], name="paged")
    mine = (await two.system.user("GET", "/v1/tasks?job=paged&limit=1")).json()["next_cursor"]
    reply = await two.system.user("GET", f"/v1/tasks?cursor={mine}", key=two.stranger)
    assert (reply.status_code, reply.json()["tasks"]) == (200, [])


# Roles and scopes


async def reached(system: System, route: Route, api_key: str) -> bool:
    """Returns True if the guard accepts the key. The handler may still reject the nonsense in the body."""
    method, path = route
    path = re.sub(r"{(index|change_id)}", "1", path)
    path = re.sub(r"{\w+}", "none-such", re.sub(r"{\w+_id}", str(uuid4()), path))
    reply = await system.user(method, path, key=api_key, json={"nonsense": True})
    assert reply.status_code != 401
    return reply.status_code != 403


def _with_keys() -> list[tuple[Route, str | None]]:
    return [(route, scope) for route, scope in routes().items() if route not in (HOOK, *OBJECTS, *SIGN_IN)]


@pytest.mark.parametrize("role", ROLES)
async def test_role_reaches_exactly_its_routes(shared: System, role: str) -> None:
    api_key = await key(shared, role=role)
    for route, scope in _with_keys():
        assert await reached(shared, route, api_key) == (scope is None or scope in ROLES[role]), (route, scope)


@pytest.mark.parametrize("scope", sorted(ROLES["admin"]))
async def test_scope_alone_reaches_exactly_its_routes(shared: System, scope: str) -> None:
    api_key = await key(shared, role="admin", scopes=[scope])
    for route, needed in _with_keys():
        assert await reached(shared, route, api_key) == (needed is None or needed == scope), (route, needed)


@pytest.mark.parametrize(
    ("role", "scopes"),
    [
        ("reader", ["jobs:write"]),
        ("writer", ["admin"]),
        ("reader", ["platform"]),
        ("writer", ["platform"]),
        ("admin", ["root"]),
        ("reader", ["jobs:read", "JOBS:WRITE"]),
    ],
)
async def test_scopes_of_a_key_are_limited_by_its_role(shared: System, role: str, scopes: list[str]) -> None:
    reply = await shared.user("POST", "/v1/keys", json={"user": "x", "role": role, "scopes": scopes})
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_scope")


async def test_key_cannot_grant_a_scope_it_does_not_have(shared: System) -> None:
    narrow = await key(shared, role="admin", scopes=["admin", "jobs:read"])
    for request in (
        {"role": "admin"},
        {"role": "writer"},
        {"role": "reader"},
        {"role": "writer", "scopes": ["jobs:write"]},
    ):
        reply = await shared.user("POST", "/v1/keys", json={"user": "x"} | request, key=narrow)
        assert (reply.status_code, reply.json()["code"]) == (403, "scope_not_held"), reply.text
    equal = await key(shared, by=narrow, role="admin", scopes=["admin", "jobs:read"])
    assert not await reached(shared, ("POST", "/v1/jobs"), equal)
    reply = await shared.user(
        "POST", "/v1/keys", json={"user": "x", "role": "admin", "scopes": ["platform"]}, key=narrow
    )
    assert reply.status_code == 400


async def test_platform_scope_is_granted_only_explicitly(shared: System) -> None:
    silent = await key(shared, role="admin")
    assert not await reached(shared, ("POST", "/v1/orgs"), silent)
    named = await key(shared, role="admin", scopes=["admin", "platform"])
    assert await reached(shared, ("POST", "/v1/orgs"), named)


async def test_admin_creates_keys_only_for_its_own_org(shared: System, two: TwoOrgs) -> None:
    reply = await shared.user("POST", "/v1/keys", json={"user": "x", "org": "test"}, key=two.stranger)
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    reply = await shared.user("POST", "/v1/keys", json={"user": "x", "org": "none-such"})
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    reply = await shared.user("POST", "/v1/orgs", json={"name": "test"})
    assert (reply.status_code, reply.json()["code"]) == (409, "org_exists")


# Malformed, unknown and revoked keys


def malformed(good: str) -> list[str]:
    return [
        "x",
        good[:-1],
        good + "A",
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        good.upper(),
        good.replace("ilk_", "ilw_"),
        "ilk_" + "0" * 16 + good[20:],
        f"{good} {good}",
        good[:21] + "é" * 43,
        "ilk_0000000000000000_" + "'; drop table orgs; --".ljust(43, "x"),
    ]


async def test_every_wrong_key_gets_the_same_refusal(shared: System) -> None:
    words = set()
    for wrong in malformed(shared.admin_key):
        headers = {b"Authorization": f"Bearer {wrong}".encode()}
        reply = await shared.http.get(shared.gateway_url + "/v1/jobs", headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated"), wrong
        words.add(reply.json()["detail"])
    assert len(words) == 1


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic {key}", "{key}", "Token {key}"])
async def test_key_requires_the_bearer_scheme(shared: System, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.format(key=shared.admin_key)}
    reply = await shared.http.get(shared.gateway_url + "/v1/jobs", headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated")


async def test_api_key_expires(still: System, clock: ManualClock) -> None:
    short = await key(still, expires_in_days=1)
    clock.advance(86_399)
    assert (await still.user("GET", "/v1/jobs", key=short)).status_code == 200
    clock.advance(1)
    assert (await still.user("GET", "/v1/jobs", key=short)).status_code == 401


async def test_revoked_key_is_refused_immediately_and_stays_listed(still: System) -> None:
    doomed = await key(still, user="doomed")
    key_id = doomed.split("_")[1]
    reply = await still.user("DELETE", f"/v1/keys/{key_id}")
    assert (reply.status_code, reply.json()["revoked_at"] is not None) == (200, True)
    assert (await still.user("GET", "/v1/jobs", key=doomed)).status_code == 401
    assert (await still.user("DELETE", f"/v1/keys/{key_id}")).json() == reply.json()
    listed = (await still.user("GET", "/v1/keys")).json()["keys"]
    assert [entry["key_id"] for entry in listed if entry["revoked_at"]] == [key_id]


async def test_revoked_key_sends_no_commands_within_seconds_anywhere(still: System, clock: ManualClock) -> None:
    assert (await still.user("POST", "/v1/services", json={"name": "billing"})).status_code in {200, 201}
    here, elsewhere = [await key(still, role="writer", service="billing") for _ in range(2)]

    async def sends(by: str) -> int:
        return (await still.user("POST", "/v1/commands", json={"metadata": {}, "command": {}}, key=by)).status_code

    assert (await sends(here), await sends(elsewhere)) == (202, 202)
    await still.user("DELETE", f"/v1/keys/{here.split('_')[1]}")
    assert (await sends(here), await sends(elsewhere)) == (401, 202)
    async with still.kernel.stores.database.connection() as connection:
        await connection.execute("update interlock.api_keys set revoked_at = now() where service is not null")
    clock.advance(3)
    assert await sends(elsewhere) == 401


async def test_only_hashes_are_stored_and_a_secret_is_shown_once(shared: System) -> None:
    made, token = await key(shared), await worker_token(shared)
    stored = await shared.value("select string_agg(k::text, '') from interlock.api_keys k")
    stored += await shared.value("select string_agg(t::text, '') from interlock.worker_tokens t")
    shown = (await shared.user("GET", "/v1/keys")).text + (await shared.user("GET", "/v1/worker-tokens")).text
    for secret in (made[21:], token[21:], shared.admin_key[21:], shared.worker_token[21:]):
        assert secret not in stored + shown
        assert secret.encode().hex() not in stored


# Workers


@pytest.fixture
async def narrow(still: System) -> str:
    return await worker_token(still, runtimes=["udf"])


async def test_worker_token_for_some_runtimes_claims_no_other(still: System, narrow: str) -> None:
    foreign, mine = await still.one(), await still.one(runtime="udf")
    capped = await still.one(scaling={"max_concurrency": 1})
    accepted = await still.submit([1, 2])
    for asked in (
        {"task_id": foreign},
        {"task_ids": [foreign, capped]},
        {"run_id": accepted["run_id"], "start": 0, "end": 1},
        {"run_id": accepted["run_id"], "start": 0, "end": 1, "limit": 1},
    ):
        reply = await still.worker("POST", "/internal/task-claim", token=narrow, json={"worker_id": "w"} | asked)
        claims = reply.json().get("claims", [reply.json()])
        assert {(claim["status"], claim["reason"]) for claim in claims} <= {("NotClaimed", "NotFound")}
    for task_id in (foreign, capped, *await still.task_ids(accepted["run_id"])):
        task = await still.task(task_id)
        assert task["status"] == "Queued"
    reply = await still.worker("GET", f"/internal/task-fetch?task_id={foreign}", token=narrow)
    assert reply.status_code == 404
    body = {"worker_id": "w", "task_id": mine}
    assert (await still.worker("POST", "/internal/task-claim", token=narrow, json=body)).json()["status"] == "Claimed"


@pytest.mark.parametrize("call", ["receive", "extend", "ack", "nack"])
@pytest.mark.parametrize("queue", ["platform", "spark", "buffer", "none-such"])
async def test_worker_token_for_some_runtimes_reaches_no_other_queue(shared: System, call: str, queue: str) -> None:
    await shared.one()
    token = await worker_token(shared, runtimes=["udf"])
    items = [{"message_id": "1", "receipt": str(uuid4())}]
    body = {"queue": queue, "worker_id": "w", "wait_seconds": 0, "items": items}
    reply = await shared.worker("POST", f"/internal/queue/{call}", token=token, json=body)
    assert (reply.status_code, reply.json()["code"]) == (403, "queue_not_granted")
    reply = await shared.worker("POST", f"/internal/queue/{call}", token=token, json=body | {"queue": "udf"})
    assert reply.status_code == 200, reply.text


async def test_claim_cannot_settle_a_message_of_a_queue_out_of_reach(still: System, narrow: str) -> None:
    await still.one()
    (message,) = await still.receive()
    receipt = {"message_id": message["message_id"], "receipt": message["receipt"]}
    for queue, status in (("platform", 403), ("udf", 200)):
        body = {"worker_id": "w", "task_id": str(uuid4()), "message": receipt | {"queue": queue}}
        assert (await still.worker("POST", "/internal/task-claim", token=narrow, json=body)).status_code == status
    assert await still.value("select count(*) from interlock.queue_messages") == 1


@pytest.mark.parametrize(("token_for", "job_in"), [("udf", "ecs_udf"), ("ecs_udf", "udf")])
async def test_runtime_alias_is_accepted_for_worker_tokens(still: System, token_for: str, job_in: str) -> None:
    token = await worker_token(still, runtimes=[token_for])
    task_id = await still.one(runtime=job_in)
    body = {"queue": "udf", "worker_id": "w", "wait_seconds": 0}
    messages = (await still.worker("POST", "/internal/queue/receive", token=token, json=body)).json()["messages"]
    assert len(messages) == 1
    body = {"worker_id": "w", "task_id": task_id}
    assert (await still.worker("POST", "/internal/task-claim", token=token, json=body)).json()["status"] == "Claimed"


async def test_revoked_worker_token_is_refused_within_seconds(still: System, clock: ManualClock) -> None:
    token = await worker_token(still)
    fetch = f"/internal/task-fetch?task_id={uuid4()}"
    assert (await still.worker("GET", fetch, token=token)).status_code == 404
    reply = await still.user("DELETE", f"/v1/worker-tokens/{token.split('_')[1]}")
    assert reply.json()["revoked_at"] is not None
    clock.advance(3)
    reply = await still.worker("GET", fetch, token=token)
    assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated")


async def test_worker_token_expires(still: System, clock: ManualClock) -> None:
    token = await worker_token(still, expires_in_days=1)
    clock.advance(timedelta(days=1).total_seconds())
    assert (await still.worker("GET", f"/internal/task-fetch?task_id={uuid4()}", token=token)).status_code == 401


async def test_worker_token_for_an_unknown_runtime_is_refused(shared: System) -> None:
    reply = await shared.user("POST", "/v1/worker-tokens", json={"name": "w", "runtimes": ["none-such"]})
    assert (reply.status_code, reply.json()["code"]) == (400, "unknown_runtime")


async def test_credentials_of_one_kind_are_refused_as_another(shared: System) -> None:
    claim = await shared.claim(await shared.one())
    token = claim["capability_token"]
    for wrong in (shared.worker_token, token):
        assert (await shared.user("GET", "/v1/jobs", key=wrong)).status_code == 401
    for wrong in (shared.admin_key, token):
        reply = await shared.worker("POST", "/internal/task-claim", token=wrong, json={"worker_id": "w"})
        assert reply.status_code == 401
    for wrong in (shared.admin_key, shared.worker_token):
        assert (await shared.attempt("/v1/task/heartbeat", wrong, fence(claim))).status_code == 401
