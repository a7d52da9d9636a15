"""`interlock source`: the sources of a DAG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, ask, command, group, range_of, usage
from interlock.cli.failures import present_with_failures
from interlock.cli.output import present, sheet, shown_range, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.wire.dags import HookSecret, SourceEvent, SourceEventsAccepted, SourceList, SourceView

app = group("Sources: jobs that always run, or start on a schedule or on request.")

DagName = Annotated[str, typer.Argument(help="Name of the DAG.", metavar="DAG")]
JobName = Annotated[str, typer.Argument(help="Name of the source job.", metavar="JOB")]


@command(app, "list", example="interlock source list chain")
def list_sources(dag: DagName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show the sources of a DAG: their state and progress."""
    present_with_failures(folder, lambda client: client.sources.of_dag(dag), output, _sources, dag=dag)


def _sources(listed: SourceList) -> RenderableType:
    rows = [
        (
            source.job if source.current else f"{source.job} (building)",
            source.kind,
            source.state,
            source.since,
            source.attempt,
            source.waiting or None,
            _next(source) or source.hook or _reached(source),
            source.paused or source.last_error,
        )
        for source in listed.sources
    ]
    columns = (
        "job",
        "kind",
        "state",
        "since",
        "attempt",
        "waiting",
        "next, hook or last event",
        "paused by, or error",
    )
    return table(columns, rows, empty="The DAG has no sources.")


def _next(source: SourceView) -> str | None:
    """Shows the next start, with the partitions that it stands for."""
    if source.next_at is None:
        return None
    start = f"{source.next_at.astimezone():%Y-%m-%d %H:%M:%S}"
    if source.next_start_date is None:
        return start
    return f"{start} for {shown_range(0, 0, source.next_start_date, source.next_end_date)}"


def _reached(source: SourceView) -> str | None:
    reached = (
        f"{one.output} {one.last_dates or one.last_scope}" for one in source.outputs if one.last_scope is not None
    )
    return ", ".join(reached) or None


@command(
    app,
    "secret",
    example="interlock source secret chain orders\ninterlock source secret chain orders --rotate",
)
def secret(
    dag: DagName,
    job: JobName,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the existing secret, which remains valid for another hour.")
    ] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create the secret of a webhook. It is shown only once."""
    present(ask(folder, lambda client: client.sources.make_secret(dag, job, rotate=rotate)), output, _secret)


def _secret(made: HookSecret) -> RenderableType:
    header = "X-Interlock-Signature" if made.auth == "hmac" else "X-Interlock-Token"
    return sheet(
        [
            ("path", made.path),
            ("secret", made.secret),
            ("auth", f"{made.auth}: {header}"),
            ("previous secret valid until", made.previous_until),
        ]
    )


@command(
    app,
    "trigger",
    example="interlock source trigger orders corrections --range 100-199\n"
    "interlock source trigger orders days --range 2026-11-01..2026-11-18\n"
    'interlock source trigger orders imports --payload \'{"file": "2025.csv"}\'',
)
def trigger(
    dag: DagName,
    job: JobName,
    payload: Annotated[
        str | None, typer.Option("--payload", help="JSON for one task of the job.", show_default=False)
    ] = None,
    cursor: Annotated[
        int | None,
        typer.Option("--cursor", min=0, help="Position up to which the output is complete.", show_default=False),
    ] = None,
    range_: Annotated[
        str | None,
        typer.Option(
            "--range", metavar="RANGE", help="Range or dates of the output that have changed.", show_default=False
        ),
    ] = None,
    output_name: Annotated[
        str | None,
        typer.Option("--of", metavar="OUTPUT", help="Output, for a job with several.", show_default=False),
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Sending again with the same key has no effect.", show_default=False)
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Send an event to a manual source: a payload for a task, or a changed scope of an output."""
    event = _event(payload, cursor, range_, output_name)
    answer = ask(folder, lambda client: client.sources.send(dag, job, [event], idempotency_key=idempotency_key))
    present(answer, output, _accepted)


def _event(payload: str | None, cursor: int | None, text: str | None, output: str | None) -> SourceEvent:
    import msgspec

    from interlock.wire.dags import SourceEvent

    if sum(given is not None for given in (payload, cursor, text)) != 1:
        raise usage("Give one of --payload, --cursor and --range")
    given: dict[str, object] = {} if output is None else {"output": output}
    if payload is not None:
        given["payload"] = _json(payload)
    elif cursor is not None:
        given["cursor"] = cursor
    else:
        given["start"], given["end"] = range_of(text or "", None)
    try:
        return msgspec.convert(given, SourceEvent)
    except msgspec.ValidationError as error:
        raise usage(str(error)) from None


def _json(text: str) -> object:
    import msgspec

    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise usage(f"--payload is not JSON: {error}") from None
    return msgspec.Raw(text.strip())


def _accepted(accepted: SourceEventsAccepted) -> str:
    return f"Accepted: {accepted.events} changed scopes, {accepted.triggers} payloads."
