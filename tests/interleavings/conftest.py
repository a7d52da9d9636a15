"""One arena per module, emptied before each race: creating a database takes longer than most races."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.interleavings.race_arena import Arena, opened


@pytest.fixture(scope="module")
async def _arena(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    server = await asyncpg.connect(postgres_url)
    await server.execute(f"create database interleavings template {template} strategy file_copy")
    url = urlunsplit(urlsplit(postgres_url)._replace(path="/interleavings"))
    async with opened(url, tmp_path_factory.mktemp("interleavings")) as arena:
        yield arena
    await server.execute("drop database interleavings with (force)")
    await server.close()


@pytest.fixture
async def arena(_arena: Arena) -> Arena:
    return await _arena.emptied()
