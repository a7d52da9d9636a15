"""Spark operators: plain functions that take and return DataFrames.

    @operator(inputs={"logs": LOGS}, output=TRANSFERS)
    def transfers(logs: DataFrame, ctx: TaskContext) -> DataFrame: ...

The name of an operator is that of a built-in one, or `module:function` for a function with this decorator in a module
that was given to the worker. Nothing else is ever imported or called.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from interlock.schemas import HOT_RANGE_COLUMN
from interlock.workers import catalogue
from interlock.workers.catalogue import Catalogue, Kind, OperatorNotFound, Source

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Schema: TypeAlias = "StructType | str"
"""Columns with their types, as a StructType or as Spark's DDL: `block_number bigint not null, address string`."""

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE: Final = "interlock.spark.built_in"
BUILT_IN: Final = {
    name: f"{_PACKAGE}.{name}:{name}"
    for name in (
        "block_ingest",
        "dedupe",
        "erc20_transfers",
        "integrity_check",
        "parquet_compact",
        "rollup",
        "sql",
    )
}
"""The platform's own Spark operators. A module is loaded when a task names its operator."""
_OF_SINKS: Final = {"buffer_load": "interlock.spark.platform.buffer_load:buffer_load"}
"""For tasks that the sink creates."""
_OF_INGESTS: Final = {"list_load": "interlock.spark.platform.list_load:list_load"}
"""For tasks that ingest processes create."""
_OF_EXPORTS: Final = {"run_export": "interlock.spark.platform.run_export:run_export"}
"""For tasks that exports of runs create."""
_OF_QUERIES: Final = {"batch_query": f"{_PACKAGE}.batch_query:batch_query"}
"""For tasks that the query service creates. Not allowed in a DAG."""

_OF_THE_PLATFORM: Final = BUILT_IN | _OF_QUERIES | _OF_SINKS | _OF_INGESTS | _OF_EXPORTS
_DECLARED: Final = "__interlock_operator__"


@dataclass(frozen=True)
class Declaration:
    """The inputs and outputs of an operator."""

    inputs: Mapping[str, Schema] | None
    """Schemas by parameter, in order. None: any inputs, as one mapping. Empty: no inputs are read."""
    outputs: Mapping[str, Schema] | Schema | None
    """Schemas by name, or the schema of the only output. None: any columns."""
    range_column: str | None
    """Column with a row's position in the range, in those outputs that have it."""


@dataclass(frozen=True)
class Operator:
    name: str
    function: Callable[..., Any]
    declaration: Declaration


def operator(
    *,
    inputs: Mapping[str, Schema] | None = None,
    output: Schema | None = None,
    outputs: Mapping[str, Schema] | None = None,
    range_column: str | None = HOT_RANGE_COLUMN,
) -> Callable[[F], F]:
    """Declares the inputs and outputs of a function, which itself stays unchanged.

    - `inputs={"logs": LOGS}`: it is called as `f(logs, ctx)`, with exactly these columns. Without `inputs` it is called
      as `f(inputs, ctx)` with a mapping of all inputs of the job, and with `inputs={}` as `f(ctx)`.
    - `output=TRANSFERS`: it returns one DataFrame with these columns. `outputs={"a": A, "b": B}`: it returns one for
      each name. Without either, any columns are allowed. In a job without outputs, the value that the function returns
      is the task's result.
    - `range_column`: the column with a row's position in the task's range, in those outputs that have it.
    """
    if output is not None and outputs is not None:
        raise TypeError("pass output= for one output or outputs= for several, not both")
    declaration = Declaration(inputs, outputs if output is None else output, range_column)

    def declare(function: F) -> F:
        _check_signature(function, declaration)
        vars(function)[_DECLARED] = declaration
        return function

    return declare


def _check_signature(function: Callable[..., Any], declaration: Declaration) -> None:
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"operator {name} must be a plain function, not a class, a method or a coroutine function")
    taken = ["inputs"] if declaration.inputs is None else list(declaration.inputs)
    try:
        inspect.signature(function).bind(*taken, "ctx")
    except TypeError:
        raise TypeError(
            f"operator {name} is called as {name}({', '.join([*taken, 'ctx'])}): give it these parameters"
        ) from None


def declared(function: object, name: str | None = None) -> Operator:
    """Returns a decorated function with its declaration. Raises OperatorNotFound."""
    shown = name or str(getattr(function, "__name__", repr(function)))
    declaration = getattr(function, _DECLARED, None)
    if not callable(function) or not isinstance(declaration, Declaration):
        raise OperatorNotFound(
            f"{shown!r} is not a Spark operator. Decorate the function with its inputs and outputs: "
            '`from interlock.spark import operator`, then `@operator(inputs={"logs": "block_number bigint, '
            'data string"}, output="block_number bigint, amount string")` above `def name(logs, ctx)`.'
        )
    return Operator(shown, function, declaration)


_given = Catalogue((), Kind.SPARK)


def give(sources: Sequence[Source]) -> Catalogue:
    """Sets the folders and modules whose operators this process may run."""
    global _given  # noqa: PLW0603 - set once, when a process that runs operators starts
    _given = Catalogue(sources, Kind.SPARK)
    return _given


def resolve(name: str) -> Operator:
    """Returns the operator behind a name. Raises OperatorNotFound."""
    if name in _OF_THE_PLATFORM:
        module, _, function = _OF_THE_PLATFORM[name].partition(":")
        return declared(getattr(importlib.import_module(module), function), name)
    return resolve_declared(name)


def resolve_declared(name: str) -> Operator:
    """Returns an operator that is not one of the platform's own. Raises OperatorNotFound."""
    if ":" not in name:
        raise OperatorNotFound(
            f"Spark has no operator {name!r}: the built-in ones are {', '.join(sorted(BUILT_IN))}; name your own as "
            "module:function."
        )
    return declared(catalogue.load(_given.find(name)), name)
