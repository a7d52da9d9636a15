"""Tests an operator without a platform: `python -m pytest examples/operators`."""

from __future__ import annotations

import pytest
from contract_activity import contract_activity

from interlock.spark import TaskFailed
from interlock.spark.testing import run

LOGS = [
    {"block_number": 10, "address": "0xa", "topic0": "transfer"},
    {"block_number": 12, "address": "0xa", "topic0": "approval"},
    {"block_number": 15, "address": "0xa", "topic0": "transfer"},
    {"block_number": 11, "address": "0xb"},
    {"block_number": 99, "address": "0xb", "topic0": "beyond the scope"},
]


def test_active_contracts_are_returned_with_their_logs() -> None:
    result = run(contract_activity, logs=LOGS, scope=(10, 19))
    assert result.rows == [
        {"address": "0xa", "logs": 3, "kinds": 2, "first_block": 10, "last_block": 15},
        {"address": "0xb", "logs": 1, "kinds": 0, "first_block": 11, "last_block": 11},
    ]


def test_contracts_below_min_logs_are_omitted() -> None:
    result = run(contract_activity, logs=LOGS, scope=(10, 19), config={"min_logs": 2})
    assert [row["address"] for row in result.rows] == ["0xa"]


def test_non_integer_min_logs_is_rejected() -> None:
    with pytest.raises(TaskFailed, match="write an integer"):
        run(contract_activity, logs=LOGS, config={"min_logs": "two"})
