"""A pipeline on its own database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.dags.routing_pipeline")

from tests.dags.routing_pipeline import Pipeline, pipeline  # noqa: E402 - modules imported before that call are not rewritten


@pytest.fixture
async def pipe(state_url: str, tmp_path: Path) -> AsyncIterator[Pipeline]:
    async with pipeline(state_url, tmp_path) as started:
        yield started
