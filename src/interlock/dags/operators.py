"""Operators that a DAG may name by a bare word. Anything else is written module:function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from interlock.kernel import operators

BUILT_IN: Final = operators.BUILT_IN - {operators.SPARK_MAP}
"""Names of the platform itself, in every runtime. `spark_map` is for runs."""

ON_SPARK: Final = frozenset(
    {"block_ingest", "dedupe", "erc20_transfers", "integrity_check", "parquet_compact", "rollup", "sql"}
)
"""Those that take and give DataFrames."""
NOT_ON_SPARK: Final = frozenset({"block_follower", "echo", "fail", "http_fetch", "python", "sleep"})

SPLITTER: Final = "range_splitter"
AGGREGATOR: Final = "range_aggregator"
RANGES: Final = frozenset({SPLITTER, AGGREGATOR})
"""Of the dispatcher; see ranges.py."""
_LARGEST: Final = 2**62


def range_problem(operator: str, config: Mapping[str, Any]) -> str | None:
    """What is wrong with the configuration of a range operator, as a clause."""
    known = {"size", "start"} if operator == AGGREGATOR else {"size"}
    unknown = sorted(map(str, config.keys() - known))
    if unknown:
        return f"{operator} has no setting {unknown[0][:60]!r}"
    if not _whole(config.get("size"), least=1):
        return f"{operator} needs a size, a whole number from 1 on"
    if not _whole(config.get("start", 0), least=0):
        return f"start of {operator} must be a whole number from 0 on"
    return None


def _whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
