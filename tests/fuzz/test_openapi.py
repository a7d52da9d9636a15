"""All operations of the OpenAPI documents, with valid credentials and work in every state.

Set INTERLOCK_FUZZ_EXAMPLES for a longer run than in CI.
"""

from __future__ import annotations

from collections.abc import Collection

import asyncpg
import pytest

from tests.fuzz.invariants import broken
from tests.fuzz.listeners import FuzzedListeners
from tests.fuzz.schemathesis_driver import Found, fuzz
from tests.fuzz.seeded_state import CAPABILITY, State
from tests.support.system import until

pytestmark = pytest.mark.timeout(3600)


async def test_gateway_responses_match_its_openapi_document(site: FuzzedListeners, state: State) -> None:
    found = fuzz(site, state, site.gateway_url, {"Authorization": f"Bearer {site.admin_key}"})
    require_reach(found)
    assert not found.failures, found.told()
    await require_whole(site)


async def test_dispatcher_responses_match_its_openapi_document(site: FuzzedListeners, state: State) -> None:
    headers = {"X-Trace-Worker-Token": site.worker_token, CAPABILITY: state.held["capability_token"]}
    headers["Authorization"] = f"Bearer {site.admin_key}"  # for the metrics
    found = fuzz(site, state, site.internal_url, headers)
    require_reach(found)
    assert not found.failures, found.told()
    await require_whole(site)


async def test_query_service_responses_match_its_openapi_document(site: FuzzedListeners, state: State) -> None:
    headers = {"Authorization": f"Bearer {site.admin_key}", CAPABILITY: state.held["capability_token"]}
    found = fuzz(site, state, site.query_url, headers)
    # None of its operations links to another.
    require_reach(found, {"examples", "coverage", "fuzzing"})
    assert not found.failures, found.told()
    await require_whole(site)


SIGN_IN = {"GET /v1/sign-in", *(f"POST /v1/sign-in/{how}" for how in ("key", "link"))}
SIGN_IN |= {f"GET /v1/sign-in/{step}" for step in ("oidc", "callback")}
OPEN = {"GET /healthz", "GET /internal/jwks/task"}
"""Operations of the dispatcher without credentials."""


def test_only_listed_operations_need_no_credential(site: FuzzedListeners) -> None:
    """The guard of an operation determines its documented credential, so a lost guard shows up here."""
    for url, known in (
        (site.gateway_url, {"GET /healthz", "POST /v1/hooks/{hook_id}", *SIGN_IN}),
        (site.internal_url, OPEN),
        (site.query_url, {"GET /healthz"}),
    ):
        paths = site.http.get(f"{url}/openapi.json").json()["paths"]
        guarded = {f"{m.upper()} {p}": o.get("security") for p, item in paths.items() for m, o in item.items()}
        assert {operation for operation, security in guarded.items() if not security} == known
        for operation, security in guarded.items():
            method, path = operation.replace("{change_id}", "1").split()
            if security:
                assert site.http.request(method, url + path).status_code == 401, operation


def require_reach(found: Found, phases: Collection[str] = ("examples", "coverage", "fuzzing", "stateful")) -> None:
    """Checks that the run proves something: every phase ran, and every operation both succeeded and refused."""
    assert found.phases == set(phases)
    operations = {operation for operation, _ in found.statuses}
    assert {operation for operation, status in found.statuses if 200 <= status <= 202} == operations
    paths = {operation.split()[1] for operation in operations}
    assert {operation.split()[1] for operation, status in found.statuses if status == 405} == paths


async def require_whole(site: FuzzedListeners) -> None:
    """Checks that the state is consistent once the loops have caught up, and that no process logged an error."""
    connection = await asyncpg.connect(site.state_url)

    async def holds() -> bool:
        return not await broken(connection)

    try:
        await until(holds, seconds=60)
    except TimeoutError:
        assert await broken(connection) == {}
    finally:
        await connection.close()
    for url in site.urls.values():
        assert site.http.get(f"{url}/healthz").json()["status"] == "ok"
    assert site.complaints() == []
