"""Declaration and lookup of Spark operators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock.dags import checks
from interlock.spark import operator
from interlock.spark.operators import BUILT_IN, declared, give, resolve
from interlock.workers.catalogue import OperatorNotFound, sources

LOGS = "block_number bigint"


def test_decorated_function_is_unchanged() -> None:
    @operator(inputs={"logs": LOGS}, output=LOGS)
    def same(logs: Any, ctx: Any) -> Any:
        """Returns its input."""
        return logs, ctx

    assert same(1, 2) == (1, 2)
    assert (same.__name__, same.__doc__) == ("same", "Returns its input.")
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
def test_function_with_a_wrong_signature_is_refused_on_declaration(function: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        operator(inputs={"logs": LOGS}, output=LOGS)(function)


def test_output_and_outputs_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="not both"):
        operator(output=LOGS, outputs={"a": LOGS})


def test_every_built_in_operator_exists_and_is_known_to_dags() -> None:
    for name in BUILT_IN:
        assert resolve(name).name == name
    assert set(BUILT_IN) <= checks.BUILT_IN


@pytest.fixture
def given() -> Iterator[None]:
    """Gives this process the operators of the tests."""
    give(sources([str(Path(__file__).parents[2])]))
    yield
    give(())


@pytest.mark.usefixtures("given")
def test_operator_is_found_by_module_and_function() -> None:
    assert resolve("tests.spark.sample_operators:counts").declaration.inputs is not None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tests.spark.sample_operators:undecorated", "declare the function with @operator"),
        ("tests.spark.sample_operators:LOGS", "declare the function with @operator"),
        ("tests.spark.sample_operators:absent", "nearest names are tests.spark.sample_operators:"),
        ("no_such_module:function", "no operator 'no_such_module:function'"),
        ("nothing", "built-in ones are block_ingest"),
    ],
)
@pytest.mark.usefixtures("given")
def test_undeclared_operator_error_explains_how_to_declare_it(name: str, sentence: str) -> None:
    with pytest.raises(OperatorNotFound, match=sentence):
        resolve(name)


def test_spark_is_not_loaded_before_an_operator_needs_it() -> None:
    code = (
        "import sys, interlock.cli.app; from interlock.spark import Scope, TaskContext, TaskFailed, operator; "
        "print([name for name in sys.modules if name.partition('.')[0] in ('pyspark', 'py4j', 'pyarrow', 'pandas')])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert finished.stdout.strip() == "[]"
