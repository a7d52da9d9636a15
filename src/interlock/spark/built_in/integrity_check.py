"""`integrity_check`: finds inconsistencies in stored chain data, internally and against its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - PySpark's usual alias
from pyspark.sql.types import BinaryType

from interlock.spark.built_in.chain_rows import EndpointConfig, answered, hashes, source_of
from interlock.spark.built_in.config import column, read_config
from interlock.spark.context import Scope, TaskContext
from interlock.spark.operators import operator
from interlock.workers.context import TaskFailed
from interlock.workers.failures import BadConfig

Check = Literal["duplicates", "links", "gaps", "branches", "source"]

FINDINGS: Final = """
    kind string not null, input string not null, key string, block_number bigint not null, expected string, found string
"""
SHOWN: Final = 20
NUMBER, HASH, PARENT = "block_number", "block_hash", "parent_hash"


class IntegrityFindings(TaskFailed):
    """The check has findings, and the job's config has `on_findings: fail`."""


class CheckConfig(EndpointConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checks: list[Check] | None = None
    """Unset: all checks for which the inputs have columns; `source` only with an `rpc_url`."""
    key: list[str] | None = None
    """Key columns of the check `duplicates`. Unset: `block_number` of blocks, `block_number` and `log_index` of logs,
    otherwise `transaction_hash`."""
    on_findings: Literal["report", "fail"] = "report"


@dataclass(frozen=True)
class Stored:
    """An input of the check."""

    name: str
    frame: DataFrame
    is_filtered: bool
    """The input has a `where`, so rows may be missing on purpose."""

    def has(self, *names: str) -> bool:
        return all(name in self.frame.columns for name in names)

    @property
    def is_blocks(self) -> bool:
        return self.has(NUMBER, HASH, PARENT)

    def text(self, name: str) -> Column:
        """Returns a hash as lowercase hex, whether it is stored as bytes or as hex."""
        if isinstance(self.frame.schema[name].dataType, BinaryType):
            return F.concat(F.lit("0x"), F.lower(F.hex(column(name))))
        return F.lower(column(name).cast("string"))

    def hashes(self, *more: str) -> DataFrame:
        """Returns the distinct pairs of number and hash, with the columns in `more`."""
        chosen = [self.text(name).alias(name) for name in (HASH, *more)]
        return self.frame.select(column(NUMBER).cast("bigint").alias(NUMBER), *chosen).distinct()


@operator(output=FINDINGS)
def integrity_check(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame | dict[str, Any]:
    """Returns one row per finding; in a job without outputs, a report as the task's result."""
    config = read_config(ctx, CheckConfig)
    filtered = {one.name for one in ctx.data.inputs if one.where is not None}
    stored = [Stored(name, inputs[name], name in filtered) for name in inputs]
    found = [frame for check in _wanted(config) for frame in _CHECKS[check](stored, config, ctx)]
    if not found:
        raise BadConfig(
            "No check applies to the inputs: they need transaction_hash, or block_number with block_hash, or the "
            "columns that `key` lists, and the check `source` needs an rpc_url."
        )
    findings = reduce(DataFrame.unionByName, found)
    if ctx.data.outputs and config.on_findings == "report":
        return findings.withColumn(NUMBER, F.coalesce(NUMBER, F.lit(ctx.scope.start if ctx.scope else 0)))
    report = _report(findings)
    if report["findings"] and config.on_findings == "fail":
        raise IntegrityFindings(_sentence(report))
    return findings.limit(0) if ctx.data.outputs else report


def _wanted(config: CheckConfig) -> list[Check]:
    if config.checks is None:
        return list(_CHECKS)
    if "source" in config.checks and config.rpc_url is None:
        raise BadConfig("The check `source` needs rpc_url in the config, such as http://127.0.0.1:8545.")
    return list(dict.fromkeys(config.checks))


# Checks: each returns the findings for those inputs that have the columns it needs


def _duplicates(stored: list[Stored], config: CheckConfig, ctx: TaskContext) -> list[DataFrame]:  # noqa: ARG001 - the signature of all checks
    if config.key is not None and not any(one.has(*config.key) for one in stored):
        raise BadConfig(f"key lists {', '.join(config.key) or 'no column'}, but no input has all these columns.")
    keys = [(one, config.key or _key(one)) for one in stored]
    return [_doubled(one, key) for one, key in keys if key and one.has(*key)]


def _key(one: Stored) -> list[str]:
    if one.is_blocks:
        return [NUMBER]
    return [NUMBER, "log_index"] if one.has(NUMBER, "log_index") else ["transaction_hash"]


def _doubled(one: Stored, key: list[str]) -> DataFrame:
    place = F.max(column(NUMBER)).cast("bigint") if one.has(NUMBER) else F.lit(None).cast("bigint")
    counted = (
        one.frame.dropna(subset=key)
        .groupBy(*map(column, key))
        .agg(F.count(F.lit(1)).alias("__interlock_count"), place.alias("__interlock_place"))
    )
    return _findings(
        counted.where(column("__interlock_count") > 1),
        "duplicate_key",
        one.name,
        key=F.concat_ws(",", *(Stored(one.name, counted, one.is_filtered).text(name) for name in key)),
        place=column("__interlock_place"),
        expected=F.lit("1"),
        found=column("__interlock_count"),
    )


def _links(stored: list[Stored], config: CheckConfig, ctx: TaskContext) -> list[DataFrame]:  # noqa: ARG001 - the signature of all checks
    return [_unlinked(one) for one in stored if one.is_blocks]


def _unlinked(one: Stored) -> DataFrame:
    blocks = one.hashes(PARENT)
    before = blocks.select((column(NUMBER) + 1).alias(NUMBER), column(HASH).alias("__interlock_before"))
    wrong = blocks.join(before, NUMBER).where(column(PARENT) != column("__interlock_before"))
    return _findings(
        wrong,
        "broken_link",
        one.name,
        key=column(HASH),
        place=column(NUMBER),
        expected=column("__interlock_before"),
        found=column(PARENT),
    )


def _gaps(stored: list[Stored], config: CheckConfig, ctx: TaskContext) -> list[DataFrame]:
    """Skips inputs whose `where` leaves blocks out, unless the config lists the check."""
    listed = config.checks is not None
    return [_missing(one, ctx) for one in stored if one.is_blocks and (listed or not one.is_filtered)]


def _missing(one: Stored, ctx: TaskContext) -> DataFrame:
    """Returns one finding per gap, not per missing block, since these may be very many."""
    numbers = one.frame.select(column(NUMBER).cast("bigint").alias(NUMBER)).distinct()
    if ctx.scope is not None:
        ends = [(ctx.scope.start - 1,), (ctx.scope.end + 1,)]
        numbers = numbers.union(ctx.spark.createDataFrame(ends, f"{NUMBER} bigint"))
    following = F.lead(NUMBER).over(Window.partitionBy(F.lit(0)).orderBy(NUMBER))
    gaps = numbers.withColumn("__interlock_next", following).where(column("__interlock_next") > column(NUMBER) + 1)
    first, last = column(NUMBER) + 1, column("__interlock_next") - 1
    return _findings(
        gaps,
        "missing_blocks",
        one.name,
        key=F.concat_ws("-", first.cast("string"), last.cast("string")),
        place=first,
        expected=last - first + 1,
        found=F.lit("0"),
    )


def _branches(stored: list[Stored], config: CheckConfig, ctx: TaskContext) -> list[DataFrame]:  # noqa: ARG001 - the signature of all checks
    blocks = [one for one in stored if one.is_blocks]
    others = [one for one in stored if one.has(NUMBER, HASH) and not one.is_blocks]
    return [_strays(one, all_) for one in others for all_ in blocks]


def _strays(one: Stored, blocks: Stored) -> DataFrame:
    known = blocks.hashes().withColumnRenamed(HASH, "__interlock_known")
    joined = one.hashes().join(known, NUMBER, "inner" if blocks.is_filtered else "left")
    wrong = joined.where(~column(HASH).eqNullSafe(column("__interlock_known")))
    return _findings(
        wrong,
        "other_branch",
        one.name,
        key=column(HASH),
        place=column(NUMBER),
        expected=column("__interlock_known"),
        found=column(HASH),
    )


def _source(stored: list[Stored], config: CheckConfig, ctx: TaskContext) -> list[DataFrame]:
    hashed = [one for one in stored if one.has(NUMBER, HASH)]
    if config.rpc_url is None or not hashed:
        return []
    source = source_of(config, config.rpc_url, ctx)
    reach = _reach(hashed)
    if reach is None:
        return [_differing(one, one.hashes()) for one in hashed]
    there = answered(ctx.spark, source, reach, hashes())
    return [_differing(one, there.select(NUMBER, F.lower(HASH).alias(HASH))) for one in hashed]


def _reach(stored: list[Stored]) -> Scope | None:
    """Returns the range of blocks that the inputs contain. The range of the task may be far larger."""
    numbers = reduce(DataFrame.union, [one.frame.select(column(NUMBER).cast("bigint")) for one in stored])
    first, last = numbers.agg(F.min(NUMBER), F.max(NUMBER)).collect()[0]
    return None if first is None else Scope(first, last)


def _differing(one: Stored, there: DataFrame) -> DataFrame:
    known = there.withColumnRenamed(HASH, "__interlock_known")
    wrong = one.hashes().join(known, NUMBER, "left").where(~column(HASH).eqNullSafe(column("__interlock_known")))
    return _findings(
        wrong,
        "not_at_source",
        one.name,
        key=column(HASH),
        place=column(NUMBER),
        expected=column("__interlock_known"),
        found=column(HASH),
    )


_CHECKS: Final[dict[Check, Callable[[list[Stored], CheckConfig, TaskContext], list[DataFrame]]]] = {
    "duplicates": _duplicates,
    "links": _links,
    "gaps": _gaps,
    "branches": _branches,
    "source": _source,
}


# Findings


def _findings(
    frame: DataFrame, kind: str, name: str, *, key: Column, place: Column, expected: Column, found: Column
) -> DataFrame:
    return frame.select(
        F.lit(kind).alias("kind"),
        F.lit(name).alias("input"),
        key.alias("key"),
        place.alias(NUMBER),
        expected.cast("string").alias("expected"),
        found.cast("string").alias("found"),
    )


def _report(findings: DataFrame) -> dict[str, Any]:
    kept = findings.persist()
    try:
        counts = {row["kind"]: row["count"] for row in kept.groupBy("kind").count().collect()}
        first = kept.orderBy("kind", NUMBER, "input", "key").limit(SHOWN).collect()
    finally:
        kept.unpersist()
    return {
        "findings": sum(counts.values()),
        "kinds": dict(sorted(counts.items())),
        "first": [row.asDict() for row in first],
    }


def _sentence(report: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["kinds"].items())
    one = report["first"][0]
    return (
        f"integrity_check found {kinds}. The first: {one['kind']} in {one['input']}, block {one[NUMBER]}, "
        f"key {one['key']}: expected {one['expected']}, found {one['found']}. Recompute the range (interlock dataset "
        "invalidate), or set `on_findings: report`."
    )
