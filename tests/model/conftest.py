"""The world that the state machine drives. Assertions in its modules are rewritten like those of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

_RULES = (
    "submission_rules",
    "loop_rules",
    "state_machine",
    "queue_rules",
    "table_checks",
    "user_rules",
    "worker_rules",
)
pytest.register_assert_rewrite(*(f"tests.model.{name}" for name in _RULES))

from tests.model.dispatchers import World, opened  # noqa: E402 - what is imported before that call is not rewritten


@pytest.fixture
def world(state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with opened(state_url, tmp_path, monkeypatch) as started:
        yield started
