"""Operators that a DAG may name without a module. All others are written module:function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interlock.tasks import operators

BUILT_IN: Final = operators.BUILT_IN - {operators.SPARK_MAP}
"""Built-in names, valid in every runtime. Excludes `spark_map`, which is for bulk runs only."""

ON_SPARK: Final = frozenset(
    {"block_ingest", "dedupe", "erc20_transfers", "integrity_check", "parquet_compact", "rollup", "sql"}
)
"""Operators that read and write DataFrames."""
NOT_ON_SPARK: Final = frozenset({"block_follower", "echo", "fail", "http_fetch", "python", "sleep"})

SPLITTER: Final = "range_splitter"
AGGREGATOR: Final = "range_aggregator"
RANGES: Final = frozenset({SPLITTER, AGGREGATOR})
"""Operators of the dispatcher; see ranges.py."""
_LARGEST: Final = 2**62


def range_problem(operator: str, config: Mapping[str, Any]) -> str | None:
    """Returns the problem of a range operator's config as a clause, or None."""
    known = {"size", "start"} if operator == AGGREGATOR else {"size"}
    unknown = sorted(map(str, config.keys() - known))
    if unknown:
        return f"{operator} has no setting {unknown[0][:60]!r}"
    if not _whole(config.get("size"), least=1):
        return f"{operator} needs a size, an integer of at least 1"
    if not _whole(config.get("start", 0), least=0):
        return f"start of {operator} must be an integer of at least 0"
    return None


def _whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
