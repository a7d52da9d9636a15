"""`interlock dag`, with a server: plan, deploy, roll back, and show deployed DAGs."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    ask,
    collect,
    command,
    usage,
)
from interlock.cli.failures import present_with_failures
from interlock.cli.output import confirm, console, must_ask, present, print_json, sheet, table
from interlock.wire.dags import DagPage, DagState, DagVersionPage, JobChange

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.dags import (
        BuildProgress,
        DagDeleted,
        DagDeployed,
        DagPause,
        DagVersionView,
        DagView,
        DeletedOutput,
        PlannedInput,
        PlannedJob,
    )

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the DAG.")]
DagName = Annotated[str, typer.Argument(metavar="DAG", help="Name of a deployed DAG.")]
OperatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--operator",
        metavar="NAME",
        help="Name under which your workers register an operator; may be repeated.",
        show_default=False,
    ),
]

_LOOK_SECONDS: Final = 0.5
_HASH: Final = 12
_MARKS: Final = {
    JobChange.ADDED: ("+", "added"),
    JobChange.CHANGED: ("~", "changed"),
    JobChange.DOWNSTREAM: ("~", "downstream of a change"),
    JobChange.TUNED: ("·", "updated in place"),
    JobChange.REMOVED: ("-", "removed"),
    JobChange.KEPT: (" ", "kept"),
}


def register(app: typer.Typer) -> None:
    """Adds the commands to `interlock dag`, next to those that need no server."""
    command(app, "plan", example="interlock dag plan examples/dags/chain.yaml")(plan)
    command(
        app,
        "deploy",
        example="interlock dag deploy examples/dags/chain.yaml --wait\n"
        "interlock dag deploy dags/mine.yaml --operator my_operator --output json",
    )(deploy)
    command(app, "list", example="interlock dag list")(list_dags)
    command(app, "show", example="interlock dag show chain")(show)
    command(app, "versions", example="interlock dag versions chain")(versions)
    command(app, "rollback", example="interlock dag rollback chain\ninterlock dag rollback chain --to 3f2a9c")(rollback)
    command(app, "cutover", example="interlock dag cutover chain --yes")(cutover)
    command(app, "pause", example="interlock dag pause chain --reason 'the node is down'")(pause)
    command(app, "resume", example="interlock dag resume chain")(resume)
    command(app, "delete", example="interlock dag delete chain --dry-run\ninterlock dag delete chain --purge --yes")(
        delete
    )
    command(app, "purge", example="interlock dag purge chain 3f2a9c --yes")(purge)


def plan(
    file: FileArgument,
    operator: OperatorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show what deploying a file would do: which jobs are rebuilt, and how much there is to build."""
    text = _text(file)
    planned = ask(
        folder, lambda client: client.dags.deploy(text, dry_run=True, operators=operator or [], file=str(file))
    )
    present(planned, output, _plan)


def deploy(
    file: FileArgument,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until the version is current.")] = False,
    operator: OperatorOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Deploy although no running worker has one of the operators.")
    ] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Deploy a file. Equal content changes nothing; the content of a retired version restores that version.

    Changed jobs are built next to the current ones and replace them when complete. With --wait, exit code 1 means that
    another deploy superseded this one.
    """
    text = _text(file)

    async def work(client: Client) -> None:
        deployed = await client.dags.deploy(text, operators=operator or [], force=force, file=str(file))
        if output is Output.TABLE:
            console().print(_plan(deployed))
        if wait and deployed.state is DagState.BUILDING:
            await _wait(client, deployed, quiet=output is Output.JSON)
        if output is Output.JSON:
            print_json(deployed if not wait else await client.dags.dag(deployed.dag))

    ask(folder, work)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise usage(f"{file} cannot be read: {error}") from None


async def _wait(client: Client, deployed: DagDeployed, *, quiet: bool) -> None:
    """Prints a line whenever something has changed, which is readable in a log and on a terminal."""
    shown = ""
    while True:
        dag = await client.dags.dag(deployed.dag)
        if dag.building is None or dag.building.dag_version != deployed.dag_version:
            break
        line = _progress_line(dag)
        if line != shown and not quiet:
            console().print(line)
            shown = line
        await asyncio.sleep(_LOOK_SECONDS)
    if dag.current is None or dag.current.dag_version != deployed.dag_version:
        print("Another version was deployed in the meantime; this one was abandoned.", file=sys.stderr)
        raise typer.Exit(1)
    if not quiet:
        console().print(f"{deployed.dag}: version {deployed.content_hash[:_HASH]} is current.")


def _progress_line(dag: DagView) -> str:
    waiting = [each for each in dag.progress if not each.complete]
    remaining = "; ".join(f"{each.name}: {_left(each)}" for each in waiting)
    return f"{dag.name}: building, {len(dag.progress) - len(waiting)} of {len(dag.progress)} jobs complete. {remaining}"


def _left(progress: BuildProgress) -> str:
    parts = [
        f"{progress.undone} scopes to do" if progress.undone else "",
        f"{progress.dead} of them failed permanently" if progress.dead else "",
        f"{progress.behind} changes to process" if progress.behind else "",
        f"{progress.unread} positions to read" if progress.unread else "",
        "catching up" if progress.catching_up else "",
    ]
    return ", ".join(part for part in parts if part) or "complete"


def _plan(deployed: DagDeployed) -> RenderableType:
    from rich.console import Group

    dated = any(job.partition for job in deployed.plan)
    rows = [_planned(job, dated=dated) for job in deployed.plan]
    columns = ("", "job", "", *(["partition"] if dated else []), "new versions of", "to read")
    state = f"is {deployed.state}" if deployed.state else "would be deployed"
    version = f", version {deployed.dag_version}" if deployed.dag_version else ""
    heading = f"DAG {deployed.dag} {state}: sha256 {deployed.content_hash[:_HASH]}{version}"
    return Group(heading, table(columns, rows, empty="The DAG has no jobs."))


def _planned(job: PlannedJob, *, dated: bool) -> tuple[Any, ...]:
    mark, words = _MARKS[job.change]
    read = [_read(each) for each in job.inputs] or None
    return mark, job.name, words, *([job.partition] if dated else []), job.new_versions or None, read


def _read(planned: PlannedInput) -> str:
    if planned.cursor is not None:
        return f"{planned.input} up to {planned.cursor}"
    many = f"more than {planned.partitions}" if planned.more else str(planned.partitions)
    dates = f", {planned.start_date}..{planned.end_date}" if planned.start_date else ""
    return f"{planned.input}: {many} partition{'s' * (planned.partitions != 1)}{dates}"


def list_dags(
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show deployed DAGs, by name."""

    async def work(client: Client) -> DagPage:
        dags, following = await collect(client.dags.page, lambda page: page.dags, cursor, limit)
        return DagPage(dags=dags, next_cursor=following)

    present_with_failures(folder, work, output, _dags)


def _dags(page: DagPage) -> RenderableType:
    rows = [
        (
            dag.name,
            "paused" if dag.paused else None,
            _hash(dag.current),
            dag.current and dag.current.current_at,
            _hash(dag.building),
        )
        for dag in page.dags
    ]
    columns = ("dag", "", "current", "since", "building")
    return table(columns, rows, empty="There are no DAGs; `interlock dag deploy` creates one.")


def _pause(pause: DagPause | None) -> str | None:
    if pause is None:
        return None
    since = pause.since.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"since {since} by {pause.by}{f': {pause.reason}' if pause.reason else ''}"


def _hash(version: DagVersionView | None) -> str | None:
    return version.content_hash[:_HASH] if version else None


def show(dag: DagName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a DAG: its jobs, its published datasets, and the progress of a version that is being built."""
    present_with_failures(folder, lambda client: client.dags.dag(dag), output, _dag, dag=dag)


def _dag(dag: DagView) -> RenderableType:
    from rich.console import Group

    rows = [
        (
            job.name,
            job.operator,
            job.runtime,
            job.source,
            job.partition,
            [each.name for each in job.outputs],
            job.paused,
            job.job_id,
        )
        for job in dag.jobs
    ]
    parts: list[RenderableType] = [
        sheet(
            [
                ("dag", dag.name),
                ("current", _hash(dag.current)),
                ("deployed by", dag.current and dag.current.deployed_by),
                ("since", dag.current and dag.current.current_at),
                ("building", _hash(dag.building)),
                ("paused", _pause(dag.paused)),
                ("publishes", dag.publish or None),
            ]
        ),
        table(
            ("job", "operator", "runtime", "source", "partition", "outputs", "paused", "id"),
            rows,
            empty="The DAG has no jobs.",
        ),
    ]
    if dag.progress:
        built = [(each.name, _left(each), each.job_id) for each in dag.progress]
        parts.append(table(("building", "remaining", "id"), built, empty=""))
    return Group(*parts)


def versions(
    dag: DagName,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the versions of a DAG, newest first."""

    async def work(client: Client) -> DagVersionPage:
        found, following = await collect(
            lambda at, size: client.dags.versions(dag, at, size), lambda page: page.versions, cursor, limit
        )
        return DagVersionPage(versions=found, next_cursor=following)

    present(ask(folder, work), output, _versions)


def _versions(page: DagVersionPage) -> RenderableType:
    rows = [
        (_hash(each), each.state, each.deployed_by, each.deployed_at, each.current_at, each.retired_at)
        for each in page.versions
    ]
    return table(("version", "state", "by", "deployed", "current", "retired"), rows, empty="The DAG has no versions.")


def rollback(
    dag: DagName,
    to: Annotated[
        str | None,
        typer.Option("--to", help="Prefix of a version's hash. Default: the previous version.", show_default=False),
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Roll back to an earlier version. It then processes the changes since it was current."""
    present(ask(folder, lambda client: client.dags.rollback(dag, to)), output, lambda done: _became(dag, done))


def cutover(
    dag: DagName, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Make the version that is being built current now, even if it is incomplete."""
    confirm(f"Make the version of {dag} that is being built current, even though it is incomplete?", yes=yes)
    present(ask(folder, lambda client: client.dags.cut_over(dag)), output, lambda done: _became(dag, done))


def pause(
    dag: DagName,
    reason: Annotated[str | None, typer.Option(help="Shown with the pause.", show_default=False)] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Pause a DAG with its sources. Running tasks end; no others start.

    Events and changes of datasets are recorded meanwhile, and are processed after `interlock dag resume`.
    """
    present(ask(folder, lambda client: client.dags.pause(dag, reason)), output, _paused)


def _paused(dag: DagView) -> str:
    return (
        f"{dag.name} is paused: its running tasks end, and no others start. What happens meanwhile is recorded.\n"
        f"Continue with: interlock dag resume {dag.name}"
    )


def resume(dag: DagName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Resume a paused DAG. It processes what was recorded meanwhile."""
    present(ask(folder, lambda client: client.dags.resume(dag)), output, lambda done: f"{done.name} is resumed.")


def delete(
    dag: DagName,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete the data of all versions.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Delete a DAG with its jobs and sources. Running tasks are asked to stop.

    Its data stays readable, and a deploy of its file restores the DAG, unless the data is purged.
    """

    async def work(client: Client) -> DagDeleted:
        if not dry_run and must_ask(yes=yes):
            console().print(_deleted(await client.dags.delete(dag, purge=purge, dry_run=True)))
            confirm(f"Delete {dag}?", yes=yes)
        return await client.dags.delete(dag, purge=purge, dry_run=dry_run)

    present(ask(folder, work), output, _deleted)


def _deleted(done: DagDeleted) -> RenderableType:
    from rich.console import Group

    verb = "would be" if done.dry_run else "is"
    data = "its data is deleted too" if done.purge else "its data is kept, and deploying its file restores it"
    heading = f"DAG {done.dag} {verb} deleted, with its jobs {', '.join(done.jobs) or '(none)'}; {data}."
    rows = [(f"{one.job}.{one.output}", _amount(one)) for one in done.outputs]
    parts: list[RenderableType] = [heading, table(("output", "data"), rows, empty="It has no data.")]
    if done.readers:
        parts.append(f"These DAGs read its data: {', '.join(done.readers)}. They get no more changes.")
    return Group(*parts)


def _amount(output: DeletedOutput) -> str:
    if output.cursor is not None:
        return f"up to {output.cursor}"
    many = f"more than {output.partitions}" if output.more else str(output.partitions)
    return f"{many} partition{'s' * (output.partitions != 1)}"


def purge(
    dag: DagName,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Prefix of a retired version's hash.")],
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Delete the data that only a retired version has. It can no longer be rolled back to."""
    confirm(f"Delete the data that only version {version} of {dag} has?", yes=yes)
    present(ask(folder, lambda client: client.dags.purge(dag, version)), output, lambda done: _became(dag, done))


def _became(dag: str, version: DagVersionView) -> str:
    return f"{dag}: version {version.content_hash[:_HASH]} is {version.state}."
