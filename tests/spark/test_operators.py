"""How operators on Spark are declared and found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock.dags import operators as known_to_dags
from interlock.pipeline import operator
from interlock.pipeline.operators import BUILT_IN, declared, give, resolve
from interlock.workers.catalogue import OperatorNotFound, sources

LOGS = "block_number bigint"


def test_a_decorated_function_stays_what_it_is() -> None:
    @operator(inputs={"logs": LOGS}, output=LOGS)
    def same(logs: Any, ctx: Any) -> Any:
        """Gives what it gets."""
        return logs, ctx

    assert same(1, 2) == (1, 2)
    assert (same.__name__, same.__doc__) == ("same", "Gives what it gets.")
    assert declared(same).declaration.inputs == {"logs": LOGS}


def no_context(logs: Any) -> None: ...
def too_many(logs: Any, blocks: Any, ctx: Any) -> None: ...
async def coroutine(logs: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (no_context, r"no_context is called as no_context\(logs, ctx\)"),
        (too_many, r"too_many is called as too_many\(logs, ctx\)"),
        (coroutine, "coroutine must be a plain function"),
        (len, "len must be a plain function"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_at_once(function: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        operator(inputs={"logs": LOGS}, output=LOGS)(function)


def test_output_and_outputs_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="not both"):
        operator(output=LOGS, outputs={"a": LOGS})


def test_every_built_in_operator_is_there_and_known_to_dags() -> None:
    for name in BUILT_IN:
        assert resolve(name).name == name
    assert set(BUILT_IN) <= known_to_dags.BUILT_IN


@pytest.fixture
def given() -> Iterator[None]:
    """This process was given the operators of the tests."""
    give(sources([str(Path(__file__).parents[2])]))
    yield
    give(())


@pytest.mark.usefixtures("given")
def test_an_operator_is_found_by_module_and_function() -> None:
    assert resolve("tests.spark.sample_operators:counts").declaration.inputs is not None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tests.spark.sample_operators:undecorated", "declare the function with @operator"),
        ("tests.spark.sample_operators:LOGS", "declare the function with @operator"),
        ("tests.spark.sample_operators:absent", "nearest names are tests.spark.sample_operators:"),
        ("no_such_module:function", "no operator 'no_such_module:function'"),
        ("nothing", "built in are block_ingest"),
    ],
)
@pytest.mark.usefixtures("given")
def test_what_is_no_operator_says_how_to_make_it_one(name: str, sentence: str) -> None:
    with pytest.raises(OperatorNotFound, match=sentence):
        resolve(name)


def test_spark_is_not_loaded_before_an_operator_needs_it() -> None:
    code = (
        "import sys, interlock.cli.app; from interlock.pipeline import Scope, TaskContext, TaskFailed, operator; "
        "print([name for name in sys.modules if name.partition('.')[0] in ('pyspark', 'py4j', 'pyarrow', 'pandas')])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert told.stdout.strip() == "[]"
