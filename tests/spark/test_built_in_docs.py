"""The documentation of built-in operators: its examples are valid, and its settings are complete."""

from __future__ import annotations

import re

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from interlock.spark.built_in.block_ingest import IngestConfig
from interlock.spark.built_in.dedupe import DedupeConfig
from interlock.spark.built_in.erc20_transfers import TransfersConfig
from interlock.spark.built_in.integrity_check import CheckConfig
from interlock.spark.built_in.parquet_compact import CompactConfig
from interlock.spark.built_in.rollup import RollupConfig
from interlock.spark.built_in.sql import SqlConfig
from interlock.spark.built_in.sql_gate import checked
from interlock.spark.operators import BUILT_IN, resolve
from tests.support.dags import valid
from tests.support.documentation import blocks, read, rows

CONFIGS: dict[str, type[msgspec.Struct]] = {
    "block_ingest": IngestConfig,
    "dedupe": DedupeConfig,
    "erc20_transfers": TransfersConfig,
    "integrity_check": CheckConfig,
    "parquet_compact": CompactConfig,
    "rollup": RollupConfig,
    "sql": SqlConfig,
}
SECTIONS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", read("docs/built-in-operators.md"), re.MULTILINE | re.DOTALL)
)


def test_every_built_in_operator_loads_and_is_documented() -> None:
    assert SECTIONS.keys() == CONFIGS.keys() == BUILT_IN.keys()
    assert [resolve(name).name for name in BUILT_IN] == list(BUILT_IN)


@pytest.mark.parametrize("name", CONFIGS)
def test_documented_settings_match_the_config(name: str) -> None:
    tables = SECTIONS[name].partition("| setting |")[2].partition("\n\n")[0]
    documented = {span for row in rows(tables) for span in re.findall(r"`(\w+)`", row[0])}
    assert documented == {field.name for field in msgspec.structs.fields(CONFIGS[name])}


@pytest.mark.parametrize("name", CONFIGS)
def test_documented_example_deploys_and_its_config_is_valid(spark: SparkSession, name: str) -> None:
    (example,) = blocks(SECTIONS[name], "yaml")
    (job,) = [job for job in valid(example).jobs if job.operator == name]
    config = msgspec.convert(job.config, CONFIGS[name])
    if isinstance(config, SqlConfig):
        assert checked(spark, config.query, dict.fromkeys(["transfers", "blocks"], StructType())) is not None
