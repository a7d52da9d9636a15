"""Claimed tasks in the driver pool, without Spark: the drivers are real, and the test plays the dispatcher."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest
from msgspec import Raw

from interlock.errors import BadRequest, ConfigurationError, Fenced
from interlock.wire.access import TaskSecret
from interlock.wire.attempts import (
    ClaimBatchReply,
    ClaimGroup,
    Completion,
    DataReply,
    DataRequest,
    Event,
    GroupedTask,
    ListLoad,
    Refusal,
    TaskData,
)
from interlock.wire.tasks import JobRef
from interlock.workers import driver_pool
from interlock.workers.claimed_tasks import Held, Pace
from interlock.workers.driver_pool import DriverPool
from interlock.workers.driver_process import PLATFORM, PREFIX, DriverLaunch, Scratch, sweep
from interlock.workers.protocol import SparkOptions

Ask = Callable[[DataRequest], Awaitable[DataReply]]

STATE_URL = "postgresql://state-database"


class Reports:
    """A report sink that records the reports for the test."""

    def __init__(self) -> None:
        self.completions: asyncio.Queue[Completion] = asyncio.Queue()
        self.released: list[UUID] = []
        self.printed_lines: list[tuple[str, str]] = []
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def complete(self, completion: Completion) -> None:
        self.completions.put_nowait(completion)

    def completed(self, held: Held, result: bytes) -> None:
        self.complete(held.completed(result))

    def printed(self, held: Held, stream: str, line: str) -> None:
        self.printed_lines.append((stream, line))

    def release(self, held: Iterable[Held]) -> None:
        self.released += [one.task_id for one in held]

    def emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None:
        answer(len(events), None)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


class Crew:
    """Pools that are ended with the test."""

    def __init__(self) -> None:
        self.reports = Reports()
        self.pools: list[DriverPool] = []

    def pool(
        self,
        ask: Ask,
        *modules: str,
        tasks: int = 2,
        per_org: bool = False,
        most_drivers: int = 4,
        operators: tuple[str, ...] = (),
    ) -> DriverPool:
        launch = DriverLaunch(
            options=SparkOptions("local[1]", None, "512m", {}, tasks, "file:///nowhere"),
            modules=modules,
            operators=operators,
            environment=("OF_USERS",),
            state_url=STATE_URL,
        )
        pool = DriverPool(launch, Pace(1), self.reports, 60, ask, per_org=per_org, most_drivers=most_drivers)
        self.pools.append(pool)
        return pool


@pytest.fixture
async def crew() -> AsyncIterator[Crew]:
    crew = Crew()
    yield crew
    for pool in crew.pools:
        await pool.abandon()


def claimed(
    tasks: int = 1, *, org: UUID | None = None, operator: str = "nobody:nothing", secret: str | None = None
) -> ClaimBatchReply:
    group = ClaimGroup(
        run_id=uuid4(),
        attempt=1,
        lease_token=uuid4(),
        lease_expires_at=datetime.now(UTC) + timedelta(minutes=1),
        timeout_at=datetime.now(UTC) + timedelta(hours=1),
        job_id=uuid4(),
        job=JobRef(dag_name=None, name=None),
        operator=operator,
        config=Raw(b"{}"),
        org_id=org or uuid4(),
        secrets=[] if secret is None else [TaskSecret(name="TOKEN", value=secret, hosts=[])],
        tasks=[GroupedTask(uuid4(), number, Raw(b"1")) for number in range(tasks)],
    )
    return ClaimBatchReply(claims=[], groups=[group])


async def test_task_whose_data_is_refused_fails_with_the_reason(crew: Crew) -> None:
    async def refuse(request: DataRequest) -> DataReply:
        task_id = request.items[0].task_id
        return DataReply(items=[], refused=[Refusal(task_id=task_id, code="too_many_files", detail="Too many files.")])

    crew.pool(refuse).take(claimed())
    completion = await asyncio.wait_for(crew.reports.completions.get(), 60)
    assert completion.error_class == "DataRefused"
    assert "Too many files." in (completion.error_message or "")


async def test_refused_data_request_fails_each_of_its_tasks(crew: Crew) -> None:
    async def refuse(request: DataRequest) -> DataReply:
        raise BadRequest("This is not how to ask.")

    crew.pool(refuse).take(claimed(2))
    completions = [await asyncio.wait_for(crew.reports.completions.get(), 60) for _ in range(2)]
    assert {completion.error_class for completion in completions} == {"DataRefused"}


async def test_fenced_attempt_is_dropped_without_a_report(crew: Crew) -> None:
    asked = asyncio.Event()

    async def refuse(request: DataRequest) -> DataReply:
        asked.set()
        code = Fenced.default_code
        return DataReply(items=[], refused=[Refusal(task_id=request.items[0].task_id, code=code, detail="Gone.")])

    pool = crew.pool(refuse)
    pool.take(claimed())
    async with asyncio.timeout(60):
        await asked.wait()
        while pool.held:
            pool.room_made.clear()
            await pool.room_made.wait()
    assert (crew.reports.completions.qsize(), crew.reports.released, pool.room(None)) == (0, [], 2)


async def test_claims_are_limited_to_permits_and_a_drain_releases_queued_tasks(crew: Crew) -> None:
    asked = asyncio.Event()

    async def never(request: DataRequest) -> DataReply:
        asked.set()
        answer: asyncio.Future[DataReply] = asyncio.get_running_loop().create_future()
        return await answer

    pool = crew.pool(never)
    assert pool.room(None) == 2
    reply = claimed(3)  # one more than there is room for, as when a message has been put back too often
    pool.take(reply)
    assert pool.room(None) == 0
    async with asyncio.timeout(60):
        await asked.wait()
        pool.drain()
        await pool.ended()
    assert sorted(crew.reports.released) == sorted(task.task_id for task in reply.groups[0].tasks)
    assert pool.held == {}


async def test_drivers_that_never_become_ready_end_the_worker_with_a_message(crew: Crew) -> None:
    async def unasked(request: DataRequest) -> DataReply:
        raise AssertionError("no driver was ready")

    crew.pool(unasked, "no_such_module_anywhere").take(claimed())
    error = await asyncio.wait_for(crew.reports.failure, 100)
    assert isinstance(error, ConfigurationError)
    assert "before they were ready" in error.detail


class Dispatcher:
    """Holds every data request until the test answers it, which leaves the driver idle again."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[DataRequest, asyncio.Future[None]]] = asyncio.Queue()

    async def ask(self, request: DataRequest) -> DataReply:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((request, answer))
        await answer
        return DataReply(
            items=[], refused=[Refusal(task_id=one.task_id, code="gone", detail="Gone.") for one in request.items]
        )

    async def next(self) -> asyncio.Future[None]:
        _, answer = await asyncio.wait_for(self.asked.get(), 60)
        return answer


async def test_orgs_share_a_driver_unless_each_has_its_own(crew: Crew) -> None:
    for per_org, drivers in ((False, 1), (True, 2)):
        dispatcher = Dispatcher()
        pool = crew.pool(dispatcher.ask, tasks=4, per_org=per_org)
        first, second = uuid4(), uuid4()
        for org in (first, second, first):
            pool.take(claimed(org=org))
        while len(pool._asking) < 3:
            await dispatcher.next()
        assert len({driver.pid for driver in pool.drivers}) == len(pool.drivers) == drivers
        assert {driver.key for driver in pool.drivers} == ({str(first), str(second)} if per_org else {""})


async def test_tasks_with_secrets_run_in_a_driver_of_their_org(crew: Crew) -> None:
    dispatcher = Dispatcher()
    pool = crew.pool(dispatcher.ask, tasks=4)
    ours, theirs = uuid4(), uuid4()
    for org, secret in ((ours, None), (theirs, "of strangers"), (theirs, None), (ours, "our own")):
        pool.take(claimed(org=org, secret=secret))
    while len(pool._asking) < 4:
        await dispatcher.next()
    assert sorted(driver.key for driver in pool.drivers) == sorted(["", str(ours), str(theirs)])
    plain = next(driver for driver in pool.drivers if not driver.key)
    assert {pool._key(held) == plain.key for held in pool.held.values() if not held.lease.private} == {True}


async def test_longest_idle_driver_is_stopped_for_another_org(crew: Crew) -> None:
    dispatcher = Dispatcher()
    pool = crew.pool(dispatcher.ask, tasks=4, per_org=True, most_drivers=2)
    orgs = [uuid4() for _ in range(3)]
    for org in orgs[:2]:
        pool.take(claimed(org=org))
        (await dispatcher.next()).set_result(None)
        await asyncio.wait_for(crew.reports.completions.get(), 60)
    pool.drivers[0].used_at, pool.drivers[1].used_at = 2.0, 1.0
    kept, oldest = pool.drivers
    pool.take(claimed(org=orgs[2]))
    assert len(pool.drivers) == 2
    await dispatcher.next()
    assert oldest not in pool.drivers
    assert [driver.key for driver in pool.drivers] == [kept.key, str(orgs[2])]


async def test_tasks_without_a_driver_are_released_when_all_drivers_are_busy(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_pool, "HOARD_SECONDS", 0.0)
    dispatcher = Dispatcher()
    pool = crew.pool(dispatcher.ask, tasks=8, per_org=True, most_drivers=2)
    for _ in range(2):
        pool.take(claimed())
        await dispatcher.next()
    waiting = claimed()
    pool.take(waiting)
    assert len(pool.drivers) == 2
    pool.look(1)
    pool.look(1)
    assert crew.reports.released == [waiting.groups[0].tasks[0].task_id]


async def test_no_driver_imports_a_file_of_the_working_directory_before_it_is_confined(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = "from pathlib import Path\nPath(__file__).with_name('run').touch()\nraise ImportError('planted')\n"
    (tmp_path / "msgspec.py").write_text(planted)
    monkeypatch.chdir(tmp_path)
    dispatcher = Dispatcher()
    pool = crew.pool(dispatcher.ask, tasks=4)
    for operator in ("nobody:nothing", "list_load"):
        pool.take(claimed(operator=operator))
        ready: asyncio.Future[Any] = asyncio.ensure_future(dispatcher.next())
        await asyncio.wait([ready, crew.reports.failure], return_when=asyncio.FIRST_COMPLETED)
        assert not (tmp_path / "run").exists()


def load_of() -> ListLoad:
    return ListLoad(run_id=uuid4(), shard=0, format="jsonl", parts=[], line_limit=1)


async def test_only_the_platform_driver_gets_the_state_url(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_USERS", "1")
    dispatcher = Dispatcher()
    pool = crew.pool(dispatcher.ask, "json", tasks=4, operators=(str(tmp_path),))
    pool.take(claimed())
    pool.take(claimed(operator="list_load"))
    for _ in range(2):
        await dispatcher.next()
    by_key = {driver.key: driver for driver in pool.drivers}
    assert by_key.keys() == {"", PLATFORM}
    started = {key: psutil.Process(driver.pid) for key, driver in by_key.items()}
    assert {key: process.cmdline()[-1] == "json" for key, process in started.items()} == {"": True, PLATFORM: False}
    assert {key: "OF_USERS" in process.environ() for key, process in started.items()} == {"": True, PLATFORM: False}
    given = {key: str(tmp_path) in process.cmdline() for key, process in started.items()}
    assert given == {"": True, PLATFORM: False}
    # Python processes that its Spark starts do not import from the working directory.
    assert started[PLATFORM].environ()["PYTHONSAFEPATH"] == "1"
    held = next(one for one in pool.held.values() if one.kind[0] == "list_load")
    load = TaskData(task_id=held.task_id, inputs=[], outputs=[], list_load=load_of())
    state_urls = {key: driver._launch.work_of(held, load, key).state_url for key, driver in by_key.items()}
    assert state_urls == {"": None, PLATFORM: STATE_URL}


def test_scratch_folder_of_a_killed_worker_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = Scratch()
    killed = (
        "import os; from interlock.workers.driver_process import Scratch; "
        "print(Scratch().path, flush=True); os._exit(9)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", killed], env=environment, capture_output=True, text=True, check=False
    )
    left = Path(finished.stdout.strip())
    assert left.is_dir()
    (tmp_path / f"{PREFIX}being-made").mkdir()
    assert sweep() == 1
    assert (left.exists(), mine.path.is_dir(), (tmp_path / f"{PREFIX}being-made").is_dir()) == (False, True, True)
    mine.remove()
    assert not mine.path.exists()
