"""Every operation of the OpenAPI documents, with real credentials and work in every state behind it.

INTERLOCK_FUZZ_EXAMPLES makes the run longer than CI's.
"""

from __future__ import annotations

from collections.abc import Collection

import asyncpg
import pytest

from tests.fuzz.driver import Found, fuzz
from tests.fuzz.site import Site
from tests.fuzz.soundness import broken
from tests.fuzz.state import CAPABILITY, State
from tests.system import until

pytestmark = pytest.mark.timeout(3600)


async def test_the_gateway_answers_everything_as_it_documents(site: Site, state: State) -> None:
    found = fuzz(site, state, site.gateway_url, {"Authorization": f"Bearer {site.admin_key}"})
    require_reach(found)
    assert not found.failures, found.told()
    await require_whole(site)


async def test_the_dispatcher_answers_everything_as_it_documents(site: Site, state: State) -> None:
    headers = {"X-Trace-Worker-Token": site.worker_token, CAPABILITY: state.held["capability_token"]}
    headers["Authorization"] = f"Bearer {site.admin_key}"  # for the metrics
    found = fuzz(site, state, site.internal_url, headers)
    require_reach(found)
    assert not found.failures, found.told()
    await require_whole(site)


async def test_the_query_service_answers_everything_as_it_documents(site: Site, state: State) -> None:
    headers = {"Authorization": f"Bearer {site.admin_key}", CAPABILITY: state.held["capability_token"]}
    found = fuzz(site, state, site.query_url, headers)
    # No operation of it leads to another.
    require_reach(found, {"examples", "coverage", "fuzzing"})
    assert not found.failures, found.told()
    await require_whole(site)


OPEN = {"GET /healthz", "GET /internal/jwks/task"}
"""Of the dispatcher."""


def test_what_needs_no_credential_is_told_here(site: Site) -> None:
    """Which credential an operation documents follows from its guard: one that lost its guard would show up here."""
    for url, known in (
        (site.gateway_url, {"GET /healthz", "POST /v1/hooks/{hook_id}"}),
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
    """Otherwise nothing was shown: every phase ran, every operation did what it is for, and refused what it should."""
    assert found.phases == set(phases)
    operations = {operation for operation, _ in found.statuses}
    assert {operation for operation, status in found.statuses if 200 <= status <= 202} == operations
    paths = {operation.split()[1] for operation in operations}
    assert {operation.split()[1] for operation, status in found.statuses if status == 405} == paths


async def require_whole(site: Site) -> None:
    """What the fuzz left behind is sound once the loops have caught up, and nobody complains."""
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
