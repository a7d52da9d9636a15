"""A pipeline on a database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.routing.pipeline")

from tests.routing.pipeline import Pipeline, pipeline  # noqa: E402 - what is imported before that call is not rewritten


@pytest.fixture
async def pipe(state_url: str, tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with pipeline(state_url, tmp_path) as started:
        yield started
