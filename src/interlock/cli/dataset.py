"""`interlock dataset`: what jobs have made, of what, and what is to be made again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from interlock.cli.asking import must_ask
from interlock.cli.connection import ask, collect
from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    command,
    group,
    usage,
)
from interlock.cli.output import cell, present, sheet, table
from interlock.wire import Direction, InvalidateRequest

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

    from interlock.client import Client
    from interlock.wire import (
        DatasetPage,
        DatasetSummary,
        DatasetView,
        Invalidated,
        Lineage,
        LineageDataset,
        LineageJob,
        PartitionPage,
        ScopeExplanation,
    )

app = group("Datasets: what the jobs of DAGs have made, and of what.")

Dataset = Annotated[str, typer.Argument(help="A published name, dag/job/output, or a uuid.", metavar="DATASET")]
Range = Annotated[str, typer.Argument(help="Inclusive, such as 100-199.", metavar="START-END")]


def _segment(dataset: str) -> str:
    """As the API has it: one segment of a path."""
    return dataset.replace("/", ":")


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(-?[0-9]{1,19})-(-?[0-9]{1,19})", text)
    if found is None:
        raise usage(f"{text!r} is no range; write START-END, such as 100-199")
    return int(found[1]), int(found[2])


@command(app, "list", example="interlock dataset list --output json")
def list_datasets(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the datasets that the key may read."""
    from interlock.wire import DatasetPage

    async def read(client: Client) -> DatasetPage:
        found, rest = await collect(client.datasets.page, lambda page: page.datasets, cursor, limit)
        return DatasetPage(datasets=found, next_cursor=rest)

    present(ask(folder, read), output, _datasets)


def _datasets(page: DatasetPage) -> RenderableType:
    rows = [(_called(one), one.storage, one.progress, one.cursor, one.dataset_uuid) for one in page.datasets]
    empty = "There are no datasets; `interlock dag deploy` makes those of a DAG."
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
            ("read by", [str(role) for role in one.read_roles]),
        ]
    )
    rows = [
        (
            version.dataset_version,
            version.state,
            version.storage,
            version.progress,
            version.cursor if version.cursor is not None else _span(version.start, version.end),
            f"{version.partitions}{'+' if version.more_partitions else ''}",
            version.created_at,
        )
        for version in one.versions
    ]
    columns = ("version", "state", "storage", "progress", "reaches", "partitions", "made")
    return Group(about, "", table(columns, rows, empty="It has no version."))


def _span(start: int | None, end: int | None) -> str | None:
    return None if start is None else f"{start}-{end}"


@command(
    app,
    "partitions",
    example="interlock dataset partitions transfers\ninterlock dataset partitions transfers --within 1000-1999",
)
def partitions(
    dataset: Dataset,
    within: Annotated[
        str | None, typer.Option("--within", metavar="START-END", help="Only those that overlap this range.")
    ] = None,
    version: Annotated[
        UUID | None, typer.Option("--version", help="Of this version. Default: the current one.", show_default=False)
    ] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the partitions of a dataset, in their order."""
    from interlock.wire import PartitionPage

    span = _range(within) if within is not None else None

    async def read(client: Client) -> PartitionPage:
        pages: list[PartitionPage] = []

        async def page(place: str | None, most: int) -> PartitionPage:
            read = await client.datasets.partition_page(_segment(dataset), place, most, version=version, within=span)
            pages.append(read)
            return read

        found, rest = await collect(page, lambda one: one.partitions, cursor, limit)
        return PartitionPage(dataset_version=pages[0].dataset_version, partitions=found, next_cursor=rest)

    present(ask(folder, read), output, _partitions)


def _partitions(page: PartitionPage) -> RenderableType:
    rows = [
        (one.partition_key, one.row_count, one.bytes, one.committed_at, one.location, one.task_id)
        for one in page.partitions
    ]
    columns = ("partition", "rows", "bytes", "committed", "location", "task")
    return table(columns, rows, empty="There are no partitions here; of a stream, `show` has the cursor.")


@command(
    app,
    "lineage",
    example="interlock dataset lineage transfers\ninterlock dataset lineage transfers --direction down --depth 2",
)
def lineage(
    dataset: Dataset,
    direction: Annotated[
        Direction, typer.Option("--direction", help="up: what it is made of. down: what is made of it.")
    ] = Direction.BOTH,
    depth: Annotated[int, typer.Option("--depth", min=1, max=50, help="Most jobs on the way.")] = 10,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Draw what a dataset is made of, and what is made of it, across DAGs."""
    found = ask(folder, lambda client: client.datasets.lineage(_segment(dataset), direction, depth))
    present(found, output, lambda kin: _Drawing(kin).tree())


class _Drawing:
    """A tree of lines. What is reached by two ways is followed once."""

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
            root.add(cell("… there is more; --depth goes farther"))
        return root

    def _follow(self, branch: Tree, dataset: UUID, *, up: bool) -> None:
        """Upstream: who writes it, and of what. Downstream: who reads it, and what that gives."""
        near, far = ("writes", "reads") if up else ("reads", "writes")
        for edge in self._found.edges:
            job = self._jobs[edge.job_id]
            if edge.dataset_uuid != dataset or edge.kind != near or (job.depth < 0) != up:
                continue
            word = "made by" if up else "read by"
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
    'interlock dataset invalidate chain/follow/logs 1000-1999 --reason "node was corrupt" --yes',
)
def invalidate(
    dataset: Dataset,
    scope: Range,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is kept with your name.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be made again.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Have a range made again: exactly the scopes that it touches, and what follows from them downstream."""
    start, end = _range(scope)

    async def send(client: Client, dry: bool) -> Invalidated:
        request = InvalidateRequest(start=start, end=end, reason=reason, dry_run=dry)
        return await client.datasets.invalidate(_segment(dataset), request)

    if not dry_run and must_ask(yes=yes):
        counted = ask(folder, lambda client: send(client, True))
        typer.confirm(f"Have {counted.scopes} scopes of {dataset} made again, and all that follows?", abort=True)
    present(ask(folder, lambda client: send(client, dry_run)), output, _invalidated)


def _invalidated(done: Invalidated) -> str:
    if done.dry_run:
        return f"{done.scopes} scopes would be made again, and what follows from them."
    if not done.scopes:
        return "Nothing in this range is there; nothing was changed."
    return f"{done.scopes} scopes are made again, and what follows from them."


@command(app, "explain", example="interlock dataset explain chain/transfers 1000-1999")
def explain(
    job: Annotated[str, typer.Argument(help="The job that is to make it: dag/job.", metavar="JOB")],
    scope: Range,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Say why a job has done a scope, or has not: what is missing, who holds it back, which task it is."""
    dag, slash, name = job.partition("/")
    if not slash:
        raise usage(f"{job!r} is no job of a DAG; write dag/job, such as chain/transfers")
    start, end = _range(scope)
    present(ask(folder, lambda client: client.datasets.explain(dag, name, start, end)), output, _explanation)


def _explanation(found: ScopeExplanation) -> RenderableType:
    return sheet([("reason", found.reason), ("detail", found.detail), ("task", found.task_id)])
