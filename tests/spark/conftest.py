"""A small Spark session per test process, shared by all tests that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from interlock.spark.testing import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    started = session()
    yield started
    started.stop()
