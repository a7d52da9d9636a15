"""Operators that a DAG may name by a bare word. Anything else is written module:function."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final = frozenset(
    {
        "block_follower",
        "block_ingest",
        "dedupe",
        "echo",
        "erc20_transfers",
        "fail",
        "integrity_check",
        "parquet_compact",
        "python",
        "range_aggregator",
        "range_splitter",
        "rollup",
        "sleep",
        "sql",
    }
)
"""Names of the platform itself, in every runtime."""
