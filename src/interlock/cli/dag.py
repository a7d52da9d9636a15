"""`interlock dag`, without a server: validates and draws DAG files. dag_deployed.py has the commands of a server."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, ask, command, group
from interlock.cli.dag_deployed import OperatorOption, register
from interlock.cli.output import print_json

if TYPE_CHECKING:
    from interlock.dags.definition import Dag
    from interlock.dags.parser import Vocabulary
    from interlock.dags.yaml_nodes import Problem

app = group("DAGs: files of jobs and the data flow between them.")


class Format(StrEnum):
    TEXT = "text"
    SVG = "svg"


@command(
    app,
    "validate",
    example="interlock dag validate examples/dags/chain.yaml\ninterlock dag validate dags/*.yaml --output json",
)
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML files, one DAG in each.")],
    operator: OperatorOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check DAG files. Exit code 1 if one has a problem.

    Every problem is shown with its line, its column and a suggestion. Nothing is deployed and no server is contacted:
    runtimes are those of the local settings, and a dataset that another DAG publishes is assumed to exist.
    """
    from interlock.dags.parser import examine_file

    vocabulary = _vocabulary(operator)
    findings = [(path, *examine_file(path, vocabulary)) for path in files]
    if output is Output.JSON:
        print_json([_finding(*finding) for finding in findings])
    else:
        for path, dag, problems in findings:
            _write("\n".join(map(str, problems)) + "\n" if dag is None else _summary(path, dag))
    if any(dag is None for _, dag, _ in findings):
        raise typer.Exit(1)


@command(
    app,
    "graph",
    example="interlock dag graph examples/dags/chain.yaml\n"
    "interlock dag graph examples/dags/chain.yaml --out chain.svg\n"
    "interlock dag graph chain",
)
def graph(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the DAG, or the name of a deployed one.")],
    format_: Annotated[
        Format | None,
        typer.Option(
            "--format", help="text for a terminal, svg for a browser. Default: by the extension of --out, else text."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write. Default: standard output.", show_default=False)
    ] = None,
    operator: OperatorOption = None,
    folder: FolderOption = None,
) -> None:
    """Draw a DAG: its jobs, the data flow between them, its sources and its published datasets.

    An argument that is not a file and has neither a folder nor an extension is the name of a deployed DAG.
    """
    named = not file.exists() and not file.suffix and file.parent == Path()
    drawing = _draw(
        _deployed(file.name, folder) if named else _valid(file, operator),
        format_ or _format_of(out),
        to_screen=out is None,
    )
    if out is None:
        _write(drawing)
    else:
        out.write_text(drawing, encoding="utf-8")


register(app)


def _deployed(name: str, folder: Path | None) -> Dag:
    from interlock.dags.definition import dag_of

    return dag_of(bytes(ask(folder, lambda client: client.dags.document(name)).document))


def _write(text: str) -> None:
    """Writes UTF-8 in any locale: the drawing has lines and arrows, and an SVG declares no other encoding."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _vocabulary(operators: list[str] | None) -> Vocabulary:
    from interlock.dags.parser import Vocabulary
    from interlock.settings import load

    return Vocabulary.of(load(), *(operators or []))


def _summary(path: Path, dag: Dag) -> str:
    from interlock.dags.definition import content_hash

    jobs, published = len(dag.jobs), len(dag.publish)
    counts = f"{jobs} job{'s' * (jobs != 1)}, {published} published"
    return f"{path}: DAG {dag.name} is valid: {counts}, sha256 {content_hash(dag)[:12]}\n"


def _finding(path: Path, dag: Dag | None, problems: list[Problem]) -> dict[str, Any]:
    """Returns a finding for programs. Any: it is JSON."""
    from interlock.dags.definition import content_hash

    return {
        "file": str(path),
        "valid": dag is not None,
        "name": dag.name if dag else None,
        "content_hash": content_hash(dag) if dag else None,
        "problems": problems,
    }


def _valid(file: Path, operators: list[str] | None) -> Dag:
    from interlock.dags.parser import examine_file

    dag, problems = examine_file(file, _vocabulary(operators))
    if dag is None:
        print("\n".join(map(str, problems)), file=sys.stderr)
        raise typer.Exit(1)
    return dag


def _format_of(out: Path | None) -> Format:
    return Format.SVG if out is not None and out.suffix.lower() == ".svg" else Format.TEXT


def _draw(dag: Dag, drawn_as: Format, *, to_screen: bool) -> str:
    from interlock.dags import drawing

    if drawn_as is Format.SVG:
        return drawing.draw_svg(dag)
    return drawing.draw_text(dag, _columns() if to_screen else drawing.WIDTH)


def _columns() -> int:
    """The width of the terminal, or 80 without one, so that a drawing in a file does not depend on who made it."""
    import shutil

    from interlock.dags.drawing import WIDTH

    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
