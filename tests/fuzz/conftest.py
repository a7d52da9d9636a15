"""One set of real processes for all of these tests: after every test, they must still serve the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from interlock.stores.embedded import EmbeddedValkey
from tests.conftest import copied
from tests.fuzz.listeners import FuzzedListeners, running_listeners
from tests.fuzz.seeded_state import State


@pytest.fixture(scope="session")
async def site(
    postgres_url: str, template: str, valkey: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FuzzedListeners]:
    folder, valkey_url = tmp_path_factory.mktemp("site"), await valkey.start()
    async with copied(postgres_url, template) as url, running_listeners(url, valkey_url, folder) as started:
        yield started


@pytest.fixture(scope="session")
def state(site: FuzzedListeners) -> State:
    return State(site)


@pytest.fixture(scope="session")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=8)) as client:
        yield client
