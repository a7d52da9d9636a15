"""`interlock dataset`: outputs of jobs, their lineage, their invalidation. `interlock buffer`: published batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

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
    group,
    range_of,
    usage,
)
from interlock.cli.failures import present_with_failures
from interlock.cli.output import cell, must_ask, present, sheet, shown_range, table
from interlock.wire.datasets import Direction, InvalidateRequest, PublishStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

    from interlock.client import Client
    from interlock.wire.datasets import (
        BufferPage,
        BufferView,
        DatasetPage,
        DatasetSummary,
        DatasetVersionView,
        DatasetView,
        Invalidated,
        Lineage,
        LineageDataset,
        LineageJob,
        PartitionPage,
        ScopeExplanation,
    )


app = group("Datasets: the outputs of jobs, and their lineage.")

Dataset = Annotated[str, typer.Argument(help="A published name, dag/job/output, or a UUID.", metavar="DATASET")]
Range = Annotated[
    str, typer.Argument(help="A range, such as 100-199 or 2026-11-01..2026-11-18, or one date.", metavar="RANGE")
]
End = Annotated[
    str | None, typer.Argument(help="Last date or position, if RANGE is the first.", metavar="END", show_default=False)
]


def _segment(dataset: str) -> str:
    """Converts a name to the API's form, which is one path segment."""
    return dataset.replace("/", ":")


@command(app, "list", example="interlock dataset list --output json")
def list_datasets(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the datasets that the key may read."""
    from interlock.wire.datasets import DatasetPage

    async def read(client: Client) -> DatasetPage:
        found, rest = await collect(client.datasets.page, lambda page: page.datasets, cursor, limit)
        return DatasetPage(datasets=found, next_cursor=rest)

    present_with_failures(folder, read, output, _datasets)


def _datasets(page: DatasetPage) -> RenderableType:
    rows = [
        (_called(one), one.storage, one.partition or one.progress, one.cursor, one.dataset_uuid)
        for one in page.datasets
    ]
    empty = "There are no datasets; `interlock dag deploy` creates those of a DAG."
    return table(("dataset", "storage", "progress", "cursor", "uuid"), rows, empty=empty)


def _called(one: DatasetSummary | DatasetView | LineageDataset) -> str:
    own = f"{one.dag}/{one.job}/{one.output}" if one.dag else str(one.dataset_uuid)
    return f"{', '.join(one.names)} ({own})" if one.names else own


@command(app, "show", example="interlock dataset show transfers\ninterlock dataset show chain/follow/logs")
def show(dataset: Dataset, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a dataset and its versions."""
    present(ask(folder, lambda client: client.datasets.show(_segment(dataset))), output, _dataset)


def _dataset(one: DatasetView) -> RenderableType:
    from rich.console import Group

    about = sheet(
        [
            ("dataset", _called(one)),
            ("uuid", one.dataset_uuid),
            ("partition", one.versions[0].partition if one.versions else None),
            ("read by", [str(role) for role in one.read_roles]),
        ]
    )
    rows = [
        (
            version.dataset_version,
            version.state,
            version.storage,
            version.progress,
            version.cursor if version.cursor is not None else _span(version),
            f"{version.partitions}{'+' if version.more_partitions else ''}",
            version.created_at,
        )
        for version in one.versions
    ]
    columns = ("version", "state", "storage", "progress", "extent", "partitions", "created")
    return Group(about, "", table(columns, rows, empty="The dataset has no version."))


def _span(version: DatasetVersionView) -> str | None:
    if version.start is None or version.end is None:
        return None
    return shown_range(version.start, version.end, version.start_date, version.end_date)


@command(
    app,
    "partitions",
    example="interlock dataset partitions transfers\ninterlock dataset partitions transfers --within 1000-1999\n"
    "interlock dataset partitions sales --within 2026-11-01..2026-11-18",
)
def partitions(
    dataset: Dataset,
    within: Annotated[
        str | None, typer.Option("--within", metavar="RANGE", help="Only partitions that overlap this range.")
    ] = None,
    version: Annotated[
        UUID | None, typer.Option("--version", help="Dataset version. Default: the current one.", show_default=False)
    ] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the partitions of a dataset, in order."""
    from interlock.wire.datasets import PartitionPage

    wanted = range_of(within, None) if within is not None else None

    async def read(client: Client) -> PartitionPage:
        pages: list[PartitionPage] = []

        async def page(place: str | None, size: int) -> PartitionPage:
            read = await client.datasets.partition_page(_segment(dataset), place, size, version=version, within=wanted)
            pages.append(read)
            return read

        found, rest = await collect(page, lambda one: one.partitions, cursor, limit)
        return PartitionPage(dataset_version=pages[0].dataset_version, partitions=found, next_cursor=rest)

    present(ask(folder, read), output, _partitions)


def _partitions(page: PartitionPage) -> RenderableType:
    rows = [
        (
            shown_range(one.start, one.end, one.start_date, one.end_date),
            one.row_count,
            one.bytes,
            one.committed_at,
            one.location,
            one.task_id,
        )
        for one in page.partitions
    ]
    columns = ("partition", "rows", "bytes", "committed", "location", "task")
    return table(columns, rows, empty="There are no partitions here; for a stream, `show` has the cursor.")


@command(
    app,
    "lineage",
    example="interlock dataset lineage transfers\ninterlock dataset lineage transfers --direction down --depth 2",
)
def lineage(
    dataset: Dataset,
    direction: Annotated[
        Direction, typer.Option("--direction", help="up: its inputs. down: datasets computed from it.")
    ] = Direction.BOTH,
    depth: Annotated[int, typer.Option("--depth", min=1, max=50, help="Maximum number of jobs on a path.")] = 10,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Draw the datasets and jobs upstream and downstream of a dataset, across DAGs."""
    found = ask(folder, lambda client: client.datasets.lineage(_segment(dataset), direction, depth))
    present(found, output, lambda kin: _Drawing(kin).tree())


class _Drawing:
    """Draws lineage as a tree. A job that is reached by two paths is expanded once."""

    def __init__(self, found: Lineage) -> None:
        self._found = found
        self._jobs: dict[UUID, LineageJob] = {job.job_id: job for job in found.jobs}
        self._datasets: dict[UUID, LineageDataset] = {one.dataset_uuid: one for one in found.datasets}
        self._drawn: set[UUID] = set()

    def tree(self) -> Tree:
        from rich.tree import Tree

        root = Tree(cell(_called(self._datasets[self._found.dataset_uuid])), guide_style="dim")
        start = self._found.dataset_uuid
        for up in (True, False):
            self._follow(root, start, up=up)
        if self._found.truncated:
            root.add(cell("… truncated; increase --depth"))
        return root

    def _follow(self, branch: Tree, dataset: UUID, *, up: bool) -> None:
        """Adds the writers and their inputs upstream, or the readers and their outputs downstream."""
        near, far = ("writes", "reads") if up else ("reads", "writes")
        for edge in self._found.edges:
            job = self._jobs[edge.job_id]
            if edge.dataset_uuid != dataset or edge.kind != near or (job.depth < 0) != up:
                continue
            word = "written by" if up else "read by"
            again = job.job_id in self._drawn
            line = f"{word} {job.dag}/{job.job}{' (as above)' if again else ''}"
            twig = branch.add(cell(line + (f" where {edge.where}" if edge.where else "")))
            if not again:
                self._drawn.add(job.job_id)
                self._others(twig, job.job_id, far, up=up)

    def _others(self, twig: Tree, job_id: UUID, kind: str, *, up: bool) -> None:
        for edge in self._found.edges:
            if edge.job_id == job_id and edge.kind == kind:
                condition = f" where {edge.where}" if edge.where else ""
                leaf = twig.add(cell(_called(self._datasets[edge.dataset_uuid]) + condition))
                self._follow(leaf, edge.dataset_uuid, up=up)


@command(
    app,
    "invalidate",
    example='interlock dataset invalidate transfers 1000-1999 --reason "wrong decimals" --dry-run\n'
    'interlock dataset invalidate chain/follow/logs 1000-1999 --reason "node was corrupt" --yes\n'
    'interlock dataset invalidate sales 2026-11-01..2026-11-18 --reason "late orders"',
)
def invalidate(
    dataset: Dataset,
    scope: Range,
    *,
    last: End = None,
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded with your name.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the scopes to recompute.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Recompute a range: exactly the scopes that overlap it, and everything downstream of them."""
    start, end = range_of(scope, last)

    async def send(client: Client, dry: bool) -> Invalidated:
        request = InvalidateRequest(start=start, end=end, reason=reason, dry_run=dry)
        return await client.datasets.invalidate(_segment(dataset), request)

    if not dry_run and must_ask(yes=yes):
        counted = ask(folder, lambda client: send(client, True))
        typer.confirm(f"Recompute {counted.scopes} scopes of {dataset} and everything downstream?", abort=True)
    present(ask(folder, lambda client: send(client, dry_run)), output, _invalidated)


def _invalidated(done: Invalidated) -> str:
    if done.dry_run:
        return f"{done.scopes} scopes would be recomputed, and everything downstream of them."
    if not done.scopes:
        return "No data exists in this range; nothing was changed."
    return f"{done.scopes} scopes are being recomputed, and everything downstream of them."


@command(app, "explain", example="interlock dataset explain chain/transfers 1000-1999")
def explain(
    job: Annotated[str, typer.Argument(help="The job: dag/job.", metavar="JOB")],
    scope: Range,
    last: End = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Explain why a job has or has not processed a scope: missing inputs, backpressure, or its task."""
    dag, slash, name = job.partition("/")
    if not slash:
        raise usage(f"{job!r} is not a job of a DAG; write dag/job, such as chain/transfers")
    start, end = range_of(scope, last)
    present(ask(folder, lambda client: client.datasets.explain(dag, name, start, end)), output, _explanation)


def _explanation(found: ScopeExplanation) -> RenderableType:
    return sheet(
        [
            ("range", shown_range(found.start, found.end, found.start_date, found.end_date)),
            ("reason", found.reason),
            ("detail", found.detail),
            ("task", found.task_id),
        ]
    )


buffers = group("Published batches of buffered datasets.")

PublishId = Annotated[UUID, typer.Argument(help="Id of the published batch.", metavar="PUBLISH_ID")]


@command(buffers, "list", example="interlock buffer list --status Refused")
def list_buffers(
    status: Annotated[
        PublishStatus | None, typer.Option(help="Only batches with this status.", show_default=False)
    ] = None,
    cursor: Annotated[str | None, typer.Option(help="next_cursor of the previous page.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of batches to show.")] = 100,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show published batches, newest first."""
    present(ask(folder, lambda client: client.buffers.page(status, cursor, limit)), output, _page)


def _page(page: BufferPage) -> RenderableType:
    rows = [
        (one.publish_id, one.status, _name(one), one.record_count, one.batch, one.published_at, _why(one))
        for one in page.buffers
    ]
    columns = ("publish", "status", "dataset", "records", "batch", "published", "reason")
    return table(columns, rows, empty="No batch has been published.")


def _name(view: BufferView) -> str:
    return view.dataset or str(view.dataset_uuid)


def _why(view: BufferView) -> str | None:
    return None if view.refusal is None else f"{view.refusal.code}: {view.refusal.detail}"


@command(buffers, "show", example="interlock buffer show 0192f0c1-…")
def show_buffer(publish_id: PublishId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a batch: its status, and its bad rows."""
    present(ask(folder, lambda client: client.buffers.show(publish_id)), output, _view)


def _view(view: BufferView) -> RenderableType:
    from rich.console import Group

    facts = sheet(
        [
            ("publish", view.publish_id),
            ("status", view.status),
            ("dataset", f"{_name(view)}, version {view.dataset_version}"),
            ("producer", f"task {view.task_id}, attempt {view.attempt}"),
            ("file", view.batch_uri),
            ("records", view.record_count),
            ("published", view.published_at),
            ("settled", view.settled_at),
            ("batch", view.batch),
            ("redrives", view.redrives or None),
            ("load task", view.load_task),
            ("file deleted", view.swept_at),
            ("reason", _why(view)),
        ]
    )
    if view.refusal is None or not view.refusal.rows:
        return facts
    rows = [(row.line, row.reason) for row in view.refusal.rows]
    return Group(facts, table(("line", "reason"), rows, empty=""))


@command(buffers, "redrive", example="interlock buffer redrive 0192f0c1-…")
def redrive_buffer(publish_id: PublishId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Load a batch again that was refused or abandoned."""
    present(ask(folder, lambda client: client.buffers.redrive(publish_id)), output, _view)
