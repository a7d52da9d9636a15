"""One small Spark per test process, for all tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from interlock.pipeline.testing import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    started = session()
    yield started
    started.stop()
