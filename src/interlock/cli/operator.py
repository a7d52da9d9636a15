"""`interlock operator`: lists built-in operators and creates a template for a new one."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import Output, OutputOption, command, group, usage
from interlock.cli.output import present, table

if TYPE_CHECKING:
    from rich.console import RenderableType

app = group("Operators: the code of jobs.")

_OPERATOR = '''\
"""{name}: describe here what it computes, and from what."""

from __future__ import annotations

from pyspark.sql import DataFrame, functions

from interlock.spark import TaskContext, operator

ROWS = "block_number bigint not null, name string"
NAMES = "block_number bigint not null, names bigint not null"


@operator(inputs={{"rows": ROWS}}, output=NAMES)
def {name}(rows: DataFrame, ctx: TaskContext) -> DataFrame:
    """Counts the distinct names in each block."""
    return rows.groupBy("block_number").agg(functions.countDistinct("name").alias("names"))
'''
_TEST = '''\
"""Tests {name} on a small Spark in this process."""

from __future__ import annotations

from {name} import {name}

from interlock.spark.testing import run


def test_names_are_counted_once_per_block() -> None:
    rows = [
        {{"block_number": 1, "name": "ada"}},
        {{"block_number": 1, "name": "ada"}},
        {{"block_number": 2, "name": None}},
        {{"block_number": 100, "name": "beyond the scope"}},
    ]
    result = run({name}, rows=rows, scope=(0, 99))
    counted = {{row["block_number"]: row["names"] for row in result.rows}}
    assert counted == {{1: 1, 2: 0}}
'''
_NEXT = """\
{operator}: the operator. Edit its schemas and its code.
{test}: its test. Run it with
  python -m pytest {test}
If the worker can import it, use it in a DAG like this:
  {{ name: {name}, runtime: spark, operator: "{name}:{name}", inputs: […], outputs: [{name}] }}"""


@command(app, "new", example="interlock operator new daily_totals\ninterlock operator new daily_totals --dir operators")
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the function and its file: letters, digits and _.")
    ],
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the two files.")] = Path(),
) -> None:
    """Create a template for a Spark operator: a file with the function, and one with its test.

    If one of the files exists, nothing is written.
    """
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name.startswith("test_"):
        raise usage(f"{name!r} cannot be the name of a function; write one like daily_totals")
    files = {folder / f"{name}.py": _OPERATOR, folder / f"test_{name}.py": _TEST}
    for path in files:
        if path.exists():
            raise usage(f"{path} already exists; choose another name or another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text.format(name=name), encoding="utf-8")
    operator, test = files
    print(_NEXT.format(operator=operator, test=test, name=name))


@command(app, "list", example="interlock operator list --output json")
def list_operators(output: OutputOption = Output.TABLE) -> None:
    """Show the built-in operators with their runtime."""
    from interlock.spark import operators
    from interlock.workers.operators import PLATFORM, built_in

    platform = {name: _first_line(function.__doc__) for name, function in built_in().items()}
    platform |= {name: _summary(path) for name, path in PLATFORM.items()}
    spark = {name: _summary(path) for name, path in operators.BUILT_IN.items()}
    found = [
        {"runtime": runtime, "operator": name, "summary": summary}
        for runtime, known in (("platform", platform), ("spark", spark))
        for name, summary in sorted(known.items())
    ]
    present(found, output, _shown)


def _shown(found: list[dict[str, str]]) -> RenderableType:
    return table(("RUNTIME", "OPERATOR", ""), (each.values() for each in found), empty="There are no operators.")


def _summary(path: str) -> str:
    """Reads the docstring from the source: importing the module would load Spark."""
    import ast
    from importlib.util import find_spec

    module, _, function = path.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return _first_line(ast.get_docstring(node))
    return ""


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
