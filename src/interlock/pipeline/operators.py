"""Operators on Spark: plain functions that take DataFrames and give DataFrames.

    @operator(inputs={"logs": LOGS}, output=TRANSFERS)
    def transfers(logs: DataFrame, ctx: TaskContext) -> DataFrame: ...

A name is that of a built-in operator, or `module:function` of a function that is declared so in a module that the
worker was given. Nothing else is ever imported or called.
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

_PACKAGE: Final = "interlock.pipeline.built_in"
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
"""Operators of the platform on Spark. They are loaded when a task names them."""
_OF_SINKS: Final = {"buffer_load": "interlock.pipeline.buffer_load:buffer_load"}
"""For tasks that the sink makes."""
_OF_INGESTS: Final = {"list_load": "interlock.pipeline.list_load:list_load"}
"""For tasks that ingest processes make."""
_OF_EXPORTS: Final = {"run_export": "interlock.pipeline.run_export:run_export"}
"""For tasks that exports of runs make."""
_OF_QUERIES: Final = {"batch_query": f"{_PACKAGE}.batch_query:batch_query"}
"""For tasks that the query service makes; it has no place in a DAG."""

_OF_THE_PLATFORM: Final = BUILT_IN | _OF_QUERIES | _OF_SINKS | _OF_INGESTS | _OF_EXPORTS
_DECLARED: Final = "__interlock_operator__"


@dataclass(frozen=True)
class Declaration:
    """What an operator takes and gives."""

    inputs: Mapping[str, Schema] | None
    """By parameter, in their order. None: any inputs, as one mapping. Empty: none are read."""
    outputs: Mapping[str, Schema] | Schema | None
    """By name; or the schema of the only one. None: any columns."""
    range_column: str | None
    """Where an output has it, it says where in a range a row belongs."""


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
    """Declare what a function takes and gives. It stays the function that it is.

    - `inputs={"logs": LOGS}`: it is called as `f(logs, ctx)`, with exactly these columns. Without `inputs` it is called
      as `f(inputs, ctx)` with a mapping of all inputs of the job, and with `inputs={}` as `f(ctx)`.
    - `output=TRANSFERS`: it returns one DataFrame of these columns; `outputs={"a": A, "b": B}`: one for each name.
      Without either, columns are what they are. A job without outputs gets as its result what the function returns.
    - `range_column` says where in the task's range a row belongs, in those outputs that have it.
    """
    if output is not None and outputs is not None:
        raise TypeError("give output= for one output or outputs= for several, not both")
    declaration = Declaration(inputs, outputs if output is None else output, range_column)

    def declare(function: F) -> F:
        _check_signature(function, declaration)
        vars(function)[_DECLARED] = declaration
        return function

    return declare


def _check_signature(function: Callable[..., Any], declaration: Declaration) -> None:
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"operator {name} must be a plain function")
    taken = ["inputs"] if declaration.inputs is None else list(declaration.inputs)
    try:
        inspect.signature(function).bind(*taken, "ctx")
    except TypeError:
        raise TypeError(
            f"operator {name} is called as {name}({', '.join([*taken, 'ctx'])}): let it take that"
        ) from None


def declared(function: object, name: str | None = None) -> Operator:
    """A decorated function with what it declares. Raises OperatorNotFound."""
    shown = name or str(getattr(function, "__name__", repr(function)))
    declaration = getattr(function, _DECLARED, None)
    if not callable(function) or not isinstance(declaration, Declaration):
        raise OperatorNotFound(
            f"{shown!r} is no operator for Spark. Decorate the function with what it takes and gives: "
            '`from interlock.pipeline import operator`, then `@operator(inputs={"logs": "block_number bigint, '
            'data string"}, output="block_number bigint, amount string")` above `def name(logs, ctx)`.'
        )
    return Operator(shown, function, declaration)


_given = Catalogue((), Kind.SPARK)


def give(sources: Sequence[Source]) -> Catalogue:
    """Sets the folders and modules whose operators this process may run."""
    global _given  # noqa: PLW0603 - a process that runs operators is given them once, at its start
    _given = Catalogue(sources, Kind.SPARK)
    return _given


def resolve(name: str) -> Operator:
    """Returns the operator behind a name. Raises OperatorNotFound."""
    if name in _OF_THE_PLATFORM:
        module, _, function = _OF_THE_PLATFORM[name].partition(":")
        return declared(getattr(importlib.import_module(module), function), name)
    return resolve_declared(name)


def resolve_declared(name: str) -> Operator:
    """Returns an operator that is not one of the platform. Raises OperatorNotFound."""
    if ":" not in name:
        raise OperatorNotFound(
            f"no operator {name!r} on Spark: built in are {', '.join(sorted(BUILT_IN))}; name your own as "
            "module:function"
        )
    return declared(catalogue.load(_given.find(name)), name)
