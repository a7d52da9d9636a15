"""The pipeline demo: a chain's blocks go through a DAG on Spark, survive a reorg, and the result is checked.

In the act of the command, one service sends a signed command to another, which recomputes a range. In the act of the
alerts, untrusted code reads transfers, and its published rows are loaded into a table. A row refers to one log of one
block, by the block's hash. So rows on blocks that a reorg replaced are not wrong about the new blocks. A row is valid
if its transfer still exists.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

import msgspec

from interlock.cli.demos.chain import Answer, FollowedChain, Place, drawn, example
from interlock.cli.output import console, table
from interlock.client import Client, QueryClient
from interlock.client.bus import Consumer, DeliveredMessage, Delivery, Producer, TelemetryConsumer
from interlock.errors import InterlockError
from interlock.wire.access import KeyRequest, Role
from interlock.wire.base import RunState, TaskStatus
from interlock.wire.bus_events import CommandDelivered
from interlock.wire.bus_registry import AclRequest, RouteRequest, ServiceRequest
from interlock.wire.dags import BackfillRequest
from interlock.wire.datasets import BufferView, DatasetVersionView, PartitionView, PublishStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pyarrow as pa
    from rich.progress import Progress, TaskID

    from interlock.wire.commands import CommandVerdict
    from interlock.wire.dags import BackfillView


ALERTS_DAG: Final = "alerts"
JOB: Final = f"{ALERTS_DAG}/large_transfers"
_ALERTS_SHOWN: Final = 3
_SHORT: Final = 10
_PAGE: Final = 1_000
_ROWS: Final = """
    select block_hash, log_index, block_number, token, from_address, to_address, value, severity
    from alert_events order by block_number desc, log_index desc
"""
_ALL: Final = """
    select a.block_hash, a.log_index, a.value, t.block_hash is not null
    from alert_events a left join transfers t on a.block_hash = t.block_hash and a.log_index = t.log_index
"""

Alerts: TypeAlias = Mapping[Place, int | None]
"""The amount of each alert, by its position in the chain."""


class BatchNotLoaded(InterlockError):
    """A batch that the code published was refused."""


class _Scope(msgspec.Struct):
    start: int
    end: int


@dataclass
class AlertWatch:
    """Tracks the ranges that the job has processed, and shows the resulting alerts."""

    client: Client
    queries: QueryClient
    _batches: set[UUID] = field(default_factory=set)
    _known: set[Place] = field(default_factory=set)

    async def deploy(self, first: int) -> None:
        content = _packed(example(f"bundles/{ALERTS_DAG}"))
        bundle = await self.client.bundles.upload(content, name=ALERTS_DAG)
        console().print(f"{bundle.size_bytes:,} bytes of Python, identified by their sha256 {bundle.sha256}:")
        text = example(f"dags/{ALERTS_DAG}.yaml").read_text().replace("size: 120 ", f"size: 120, start: {first} ")
        console().print(drawn(text), markup=False)
        await self.client.dags.deploy(text)

    async def look(self) -> Counter[tuple[int, int]]:
        """Returns how often each range was processed with all its alerts loaded into the table."""
        # In this order: a task's batches are published before the task completes.
        page = await self.client.task_page(job=JOB, status=TaskStatus.COMPLETED, limit=_PAGE)
        batches = (await self.client.buffers.page(limit=_PAGE)).buffers
        await self._show(batches)
        waiting = {batch.task_id for batch in batches if batch.status is not PublishStatus.LOADED}
        scopes = [msgspec.json.decode(task.payload, type=_Scope) for task in page.tasks if task.task_id not in waiting]
        return Counter((scope.start, scope.end) for scope in scopes)

    async def _show(self, batches: Sequence[BufferView]) -> None:
        for batch in batches:
            if batch.refusal is not None:
                raise BatchNotLoaded(f"The sink refused a batch of alerts: {batch.refusal.detail}")
        loaded = {batch.publish_id for batch in batches if batch.status is PublishStatus.LOADED}
        if loaded <= self._batches:
            return
        self._batches |= loaded
        rows = await self._ask(_ROWS)
        new = [row for row in rows if (row[0], row[1]) not in self._known]
        self._known |= {(row[0], row[1]) for row in new}
        _print_alerts(new)

    async def found(self) -> tuple[Alerts, Alerts]:
        """Returns all rows of the table: those whose transfer is in the dataset, and those whose block is gone."""
        if not self._batches:
            return {}, {}
        hold: dict[Place, int | None] = {}
        gone: dict[Place, int | None] = {}
        for block_hash, log_index, value, is_there in await self._ask(_ALL):
            (hold if is_there else gone)[block_hash, log_index] = None if value is None else int(value)
        return hold, gone

    async def _ask(self, sql: str) -> list[list[Any]]:
        reply = await self.queries.ask(sql)
        return msgspec.json.decode(reply.rows, type=list[list[Any]])


def _print_alerts(rows: Sequence[Sequence[Any]]) -> None:
    many = f"{len(rows)} new alerts, the latest" if len(rows) > _ALERTS_SHOWN else "New alerts"
    console().print(f"{many}:" if rows else "A new batch contains only known alerts.")
    if rows:
        columns = ("block", "token", "from", "to", "amount", "severity")
        console().print(table(columns, map(_shortened, rows[:_ALERTS_SHOWN]), empty=""))


def _shortened(row: Sequence[Any]) -> list[Any]:
    _, _, block, token, sender, recipient, value, severity = row
    return [block, *(f"{address[:_SHORT]}…" for address in (token, sender, recipient)), value, severity]


def _packed(folder: Path) -> bytes:
    from interlock.archives import pack

    with tempfile.TemporaryDirectory(prefix="interlock-demo-bundle-") as scratch:
        target = Path(scratch) / "bundle.zip"
        pack(folder, target)
        return target.read_bytes()


_ASKS: Final = "auditor"
_DOES: Final = "pipeline"
_COMMAND: Final = "recompute"
_QUEUE: Final = "recomputations"
_WAIT_SECONDS: Final = 10.0


class Wanted(msgspec.Struct):
    """The payload of the command."""

    dag: str
    job: str
    start: int
    end: int


@dataclass(frozen=True)
class Office:
    """Two services, each with its own key, that communicate only over the bus."""

    client: Client
    """An admin client: it registers the services, and the receiving service uses it to start the backfill."""
    url: str

    async def ask(self, wanted: Wanted) -> bool:
        """Returns True if the range was recomputed and the sender received a delivery confirmation."""
        await self._register()
        asks, does = await self._key(_ASKS), await self._key(_DOES)
        started: asyncio.Future[UUID] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        async with Consumer(self.url, does, _QUEUE) as consumer, Producer(self.url, asks) as producer:
            consuming = asyncio.create_task(consumer.run(self._doing(started), stop=stop))
            try:
                verdict = await producer.send(_DOES, _COMMAND, msgspec.to_builtins(wanted))
                run_id = await asyncio.wait_for(started, _WAIT_SECONDS)
            finally:
                stop.set()
                await consuming
        made = await self.client.backfills.wait(run_id)
        return await self._show(verdict, made, asks)

    async def _register(self) -> None:
        registry = self.client.registry
        for service in (_ASKS, _DOES):
            await registry.put_service(ServiceRequest(name=service))
        await registry.put_route(
            RouteRequest(target=_DOES, name=_COMMAND, queue=_QUEUE, dlq=f"{_QUEUE}-dead"),
        )
        await registry.put_acl(AclRequest(source=_ASKS, target=_DOES, name=_COMMAND))

    async def _key(self, service: str) -> str:
        made = await self.client.create_key(KeyRequest(user=service, role=Role.READER, service=service))
        return made.key

    def _doing(self, started: asyncio.Future[UUID]) -> Callable[[Delivery[DeliveredMessage]], Awaitable[None]]:
        async def recompute(delivery: Delivery[DeliveredMessage]) -> None:
            command = delivery.body.command
            wanted = msgspec.convert(command.payload, Wanted)
            request = BackfillRequest(start=wanted.start, end=wanted.end, reason=f"requested by {command.source}")
            answer = await self.client.backfills.start(wanted.dag, wanted.job, request)
            if answer.backfill is not None and not started.done():
                started.set_result(answer.backfill.run_id)

        return recompute

    async def _show(self, verdict: CommandVerdict, made: BackfillView, key: str) -> bool:
        delivered = await self._delivery_event(verdict.command_id, key)
        rows = [
            ("command", verdict.outcome),
            ("telemetry", "nothing" if delivered is None else f"delivered, by the {delivered.path} stage"),
            ("backfill", made.run_state.value),
        ]
        console().print(table(("", ""), rows, empty=""))
        return delivered is not None and made.run_state is RunState.COMPLETED

    async def _delivery_event(self, command_id: str | None, key: str) -> CommandDelivered | None:
        """Returns the telemetry event for the command."""
        async with TelemetryConsumer(self.url, key) as telemetry:
            until = asyncio.get_running_loop().time() + _WAIT_SECONDS
            while asyncio.get_running_loop().time() < until:
                for delivery in await telemetry.receive(wait_seconds=2):
                    await delivery.ack()
                    for event in delivery.body.events:
                        if isinstance(event, CommandDelivered) and str(event.command_id) == str(command_id):
                            return event
        return None


DAG: Final = "tokens"
RANGE: Final = 30
SPAN: Final = 120
"""As in the DAG file."""
REORG_DEPTH: Final = 5
_FOLLOWED: Final = f"{DAG}:follow:logs"
_MADE: Final = {"transfers": RANGE, "volumes": RANGE, "activity": RANGE, "compact_transfers": SPAN}
"""Published datasets, with the number of blocks per partition."""
ALERTS: Final = "alert_events"
_LOOK_SECONDS: Final = 0.3
_LINE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 180.0
_SHOWN: Final = 5


Scope: TypeAlias = tuple[int, int]


class DemoFailed(InterlockError):
    """The demo could not be finished."""


@dataclass(frozen=True)
class Play:
    client: Client
    chain: FollowedChain
    first: int
    """The first block; a multiple of SPAN."""
    tame: bool
    """The demo controls mining and reorgs of the chain."""
    alerts: AlertWatch
    office: Office

    def last_of(self, size: int, head: int) -> int:
        """Returns the last block of the last complete range of that size."""
        return self.first + (head - self.first + 1) // size * size - 1


async def play(stage: Play) -> bool:
    begun = time.monotonic()
    await deploy(stage)
    await add_code(stage)
    head = await stage.chain.head()
    await follow(stage, head)
    taken_back: Alerts = {}
    if stage.tame:
        taken_back = await reorganise(stage, head)
        head = await go_on(stage)
    obeyed = await command(stage)
    passed = await check(stage, head, taken_back) and obeyed
    if passed:
        console().print(f"\n[bold green]The result is correct.[/] The demo took {time.monotonic() - begun:.0f} s.")
    else:
        console().print("\n[bold red]The result is wrong:[/] run it again with --keep and look at the logs.")
    return passed


def _heading(title: str) -> None:
    console().print(f"\n[bold cyan]{title}[/]")


# The acts


async def deploy(stage: Play) -> None:
    _heading("1. Deploy a DAG")
    text = example(f"dags/{DAG}.yaml").read_text()
    for named, value in (
        ('rpc_url: "http://127.0.0.1:8545"', f'rpc_url: "{stage.chain.url}"'),
        ("start_block: 0", f"start_block: {stage.first}"),
        (f"size: {RANGE} ", f"size: {RANGE}, start: {stage.first} "),
        (f"size: {SPAN} ", f"size: {SPAN}, start: {stage.first} "),
    ):
        text = text.replace(named, value)
    console().print(drawn(text), markup=False)
    await stage.client.dags.deploy(text)
    console().print(
        "The follower copies blocks into the data database. Each range of 30 blocks becomes a task, and its output "
        "triggers further tasks. Spark starts with the first of them."
    )


async def add_code(stage: Play) -> None:
    _heading("2. Add untrusted code")
    await stage.alerts.deploy(stage.first)
    console().print(
        "It runs in a sandbox, with a token that allows it to query the transfers of its range and to publish alerts "
        "on large ones. The sink validates the published rows and loads them."
    )


async def follow(stage: Play, head: int) -> None:
    _heading(f"3. Process blocks {stage.first} to {head}")
    await until_made(stage, head)


async def reorganise(stage: Play, head: int) -> Alerts:
    """Replaces the last blocks and returns the alerts on the replaced ones."""
    _heading(f"4. A reorg replaces the last {REORG_DEPTH} blocks")
    rewritten = head - REORG_DEPTH + 1
    before = await _scopes(stage)
    taken_back = await stage.chain.answer(rewritten, stage.last_of(SPAN, head), RANGE)
    await stage.chain.call("dev_reorg", REORG_DEPTH)
    expected = {name: _touched(scopes, rewritten, head) for name, scopes in before.items()}
    with _board("recomputed", expected) as board:
        while True:
            await _look_for_dead_letters(stage.client)
            after = await _scopes(stage)
            again = {name: _again(before[name], after[name]) for name in before}
            board.show({name: len(scopes) for name, scopes in again.items()})
            if all(len(again[name]) >= expected[name] for name in before):
                break
            await board.wait()
    rows = [(name, ", ".join(again[name]), len(after[name]) - len(again[name])) for name in before]
    console().print("Exactly the ranges that the reorg changed were recomputed:")
    console().print(table(("dataset", "recomputed", "unchanged"), rows, empty="Nothing."))
    return taken_back.large


async def _scopes(stage: Play) -> dict[str, Mapping[Scope, int]]:
    """Returns the ranges of each dataset, each with a number that grows when the range is recomputed."""
    made: dict[str, Mapping[Scope, int]] = {
        name: {(one.start, one.end): one.commit for one in await partitions(stage.client, name)} for name in _MADE
    }
    return made | {ALERTS: await stage.alerts.look()}


def _touched(scopes: Iterable[Scope], first: int, last: int) -> int:
    return sum(end >= first and start <= last for start, end in scopes)


def _again(before: Mapping[Scope, int], after: Mapping[Scope, int]) -> list[str]:
    return [f"{start}-{end}" for (start, end), made in after.items() if made > before.get((start, end), made)]


async def go_on(stage: Play) -> int:
    _heading(f"5. Mine {SPAN} new blocks")
    await stage.chain.call("dev_mine", SPAN)
    head = await stage.chain.head()
    await until_made(stage, head)
    return head


async def command(stage: Play) -> bool:
    _heading(f"{6 if stage.tame else 4}. A service requests a recomputation")
    console().print(
        "An auditor sends a signed command. The pipeline receives it with its own key and starts a backfill. "
        "The two services know only each other's names."
    )
    return await stage.office.ask(Wanted(DAG, "activity", stage.first, stage.first + RANGE - 1))


# Waiting, with progress


async def until_made(stage: Play, head: int) -> None:
    blocks = head - stage.first + 1
    wanted = {"blocks": blocks} | {name: blocks // size for name, size in (_MADE | {ALERTS: SPAN}).items()}
    with _board("", wanted) as board:
        while True:
            await _look_for_dead_letters(stage.client)
            followed = await _version(stage.client, _FOLLOWED)
            made = {"blocks": max((followed.cursor or stage.first - 1) - stage.first + 1, 0)}
            for name in _MADE:
                made[name] = (await _version(stage.client, name)).partitions
            made[ALERTS] = len(await stage.alerts.look())
            board.show(made)
            if all(made[name] >= wanted[name] for name in wanted):
                return
            await board.wait()


async def _version(client: Client, dataset: str) -> DatasetVersionView:
    view = await client.datasets.show(dataset)
    return next(one for one in view.versions if one.dataset_version == view.current_version)


async def partitions(client: Client, dataset: str) -> list[PartitionView]:
    found: list[PartitionView] = []
    cursor = None
    while True:
        page = await client.datasets.partition_page(dataset, cursor)
        found += page.partitions
        cursor = page.next_cursor
        if cursor is None:
            return found


async def _look_for_dead_letters(client: Client) -> None:
    page = await client.task_page(status=TaskStatus.FAILED, limit=1)
    for task in page.tasks:
        if task.dead:
            why = f"{task.error_class}: {task.error_message}"
            raise DemoFailed(f"A task of job {task.job.name} has failed permanently: {why}")


class _Board:
    """Progress bars on a terminal, lines elsewhere."""

    def __init__(self, label: str, wanted: Mapping[str, int]) -> None:
        self._label, self._wanted = label, wanted
        self._until = time.monotonic() + _PATIENCE_SECONDS
        self._said_at = time.monotonic()
        self._bars: Progress | None = None
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> _Board:
        if console().is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=console())
            self._bars.start()
            self._rows = {name: self._bars.add_task(name, total=total) for name, total in self._wanted.items()}
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, made: Mapping[str, int]) -> None:
        done = all(made[name] >= total for name, total in self._wanted.items())
        if self._bars is not None:
            for name, row in self._rows.items():
                self._bars.update(row, completed=min(made[name], self._wanted[name]))
        elif done or time.monotonic() - self._said_at > _LINE_SECONDS:
            self._said_at = time.monotonic()
            shown = ", ".join(f"{name} {made[name]} of {total}" for name, total in self._wanted.items())
            console().print(f"{self._label}{': ' * bool(self._label)}{shown}")

    async def wait(self) -> None:
        if time.monotonic() > self._until:
            raise DemoFailed(
                f"No progress for {_PATIENCE_SECONDS:.0f} s: run the demo with --keep, and read "
                "logs/worker-spark.log in its folder."
            )
        await asyncio.sleep(_LOOK_SECONDS)


def _board(label: str, wanted: Mapping[str, int]) -> _Board:
    return _Board(label, wanted)


# The answer


async def check(stage: Play, head: int, taken_back: Alerts) -> bool:
    """Compares the datasets' files with the expected results, computed directly from the chain."""
    _heading("7. Check the result" if stage.tame else "5. Check the result")
    last, compacted = stage.last_of(RANGE, head), stage.last_of(SPAN, head)
    expected = await stage.chain.answer(stage.first, last, RANGE)
    compacted_part = expected if compacted == last else await stage.chain.answer(stage.first, compacted, RANGE)
    transfers = await rows_of(stage.client, "transfers")
    compact = await rows_of(stage.client, "compact_transfers")
    volumes = await rows_of(stage.client, "volumes")
    activity = await rows_of(stage.client, "activity")
    hold, gone = await stage.alerts.found()
    rows = [
        (f"transfers in blocks {stage.first}-{last}", expected.transfers, transfers.num_rows),
        (f"compacted transfers in {stage.first}-{compacted}", compacted_part.transfers, compact.num_rows),
        ("distinct hours and tokens", len(expected.counts), len(set(_keys(volumes)))),
        ("logs of contracts with two or more in a range", expected.busy_logs, sum(activity["logs"].to_pylist())),
        *_by_token(expected, volumes),
        ("alerts on current transfers", len(compacted_part.large), len(hold)),
        *[("alerts on replaced blocks", len(taken_back), len(gone))] * stage.tame,
    ]
    shown = [(*row, "ok" if row[1] == row[2] else "fail") for row in rows]
    console().print(table(("", "chain", "datasets", ""), shown, empty="Nothing."))
    # Values that the table does not show must be right, too.
    right = (
        _sums(volumes) == expected.volumes and hold == compacted_part.large and (not stage.tame or gone == taken_back)
    )
    return right and all(row[-1] == "ok" for row in shown)


async def rows_of(client: Client, dataset: str) -> pa.Table:
    """Returns all rows of a dataset, read from its committed files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = await partitions(client, dataset)
    files = [one.location.removeprefix("file://") for one in found if one.location is not None]
    return pa.concat_tables(await asyncio.gather(*(asyncio.to_thread(pq.read_table, file) for file in files)))


def _keys(volumes: pa.Table) -> list[tuple[int, str]]:
    hours = [int(moment.timestamp()) // 3600 for moment in volumes["bucket"].to_pylist()]
    return list(zip(hours, volumes["token"].to_pylist(), strict=True))


def _sums(volumes: pa.Table) -> Counter[tuple[int, str]]:
    """Sums volumes by hour and token. An hour that spans several ranges has a row in each."""
    sums: Counter[tuple[int, str]] = Counter()
    for key, volume in zip(_keys(volumes), volumes["volume"].to_pylist(), strict=True):
        sums[key] += int(volume)
    return sums


def _by_token(expected: Answer, volumes: pa.Table) -> list[tuple[str, int, int]]:
    """Compares the volumes of the most frequently transferred tokens."""
    there: Counter[str] = Counter()
    for (_, token), volume in _sums(volumes).items():
        there[token] += volume
    moves, sums = Counter[str](), Counter[str]()
    for (hour, token), count in expected.counts.items():
        moves[token] += count
        sums[token] += expected.volumes[hour, token]
    return [(f"volume of {token}", sums[token], there[token]) for token, _ in moves.most_common(_SHOWN)]
