"""What becomes of claimed tasks before Spark is ever needed: drivers are real here, the dispatcher is the test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from msgspec import Raw

from interlock.errors import BadRequest, ConfigurationError, Fenced
from interlock.wire import (
    ClaimBatchReply,
    ClaimGroup,
    Completion,
    DataReply,
    DataRequest,
    Event,
    GroupedTask,
    JobRef,
    Refusal,
)
from interlock.workers.driver_pool import DriverPool
from interlock.workers.driver_process import DriverLaunch
from interlock.workers.held import Held
from interlock.workers.pace import Pace
from interlock.workers.protocol import SparkOptions
from interlock.workers.scratch import PREFIX, Scratch, sweep

Ask = Callable[[DataRequest], Awaitable[DataReply]]


class Told:
    """The desk, as the test reads it."""

    def __init__(self) -> None:
        self.completions: asyncio.Queue[Completion] = asyncio.Queue()
        self.released: list[UUID] = []
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def complete(self, completion: Completion) -> None:
        self.completions.put_nowait(completion)

    def completed(self, held: Held, result: bytes) -> None:
        self.complete(held.completed(result))

    def release(self, held: Iterable[Held]) -> None:
        self.released += [one.task_id for one in held]

    def emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None:
        answer(len(events), None)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


class Crew:
    """Pools that the test ends with."""

    def __init__(self) -> None:
        self.told = Told()
        self.pools: list[DriverPool] = []

    def pool(self, ask: Ask, *modules: str) -> DriverPool:
        options = SparkOptions("local[1]", None, "512m", {}, 2, "file:///nowhere")
        launch = DriverLaunch(options=options, modules=modules)
        self.pools.append(DriverPool(launch, Pace(1), self.told, 60, ask))
        return self.pools[-1]


@pytest.fixture
async def crew() -> AsyncIterator[Crew]:
    crew = Crew()
    yield crew
    for pool in crew.pools:
        await pool.abandon()


def claimed(tasks: int = 1) -> ClaimBatchReply:
    group = ClaimGroup(
        run_id=uuid4(),
        attempt=1,
        lease_token=uuid4(),
        lease_expires_at=datetime.now(UTC) + timedelta(minutes=1),
        timeout_at=datetime.now(UTC) + timedelta(hours=1),
        job_id=uuid4(),
        job=JobRef(dag_name=None, name=None),
        operator="nobody:nothing",
        config=Raw(b"{}"),
        org_id=uuid4(),
        tasks=[GroupedTask(uuid4(), number, Raw(b"1")) for number in range(tasks)],
    )
    return ClaimBatchReply(claims=[], groups=[group])


async def test_what_the_dispatcher_refuses_to_describe_fails_with_its_reason(crew: Crew) -> None:
    async def refuse(request: DataRequest) -> DataReply:
        task_id = request.items[0].task_id
        return DataReply(items=[], refused=[Refusal(task_id=task_id, code="too_many_files", detail="Too many files.")])

    crew.pool(refuse).take(claimed())
    completion = await asyncio.wait_for(crew.told.completions.get(), 60)
    assert completion.error_class == "DataRefused"
    assert "Too many files." in (completion.error_message or "")


async def test_a_call_that_is_refused_as_a_whole_fails_each_of_its_tasks(crew: Crew) -> None:
    async def refuse(request: DataRequest) -> DataReply:
        raise BadRequest("This is not how to ask.")

    crew.pool(refuse).take(claimed(2))
    told = [await asyncio.wait_for(crew.told.completions.get(), 60) for _ in range(2)]
    assert {completion.error_class for completion in told} == {"DataRefused"}


async def test_an_attempt_that_is_fenced_off_by_then_is_dropped_in_silence(crew: Crew) -> None:
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
    assert (crew.told.completions.qsize(), crew.told.released, pool.room(None)) == (0, [], 2)


async def test_no_more_is_claimed_than_runs_at_once_and_a_drain_gives_back_what_has_not_begun(crew: Crew) -> None:
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
    assert sorted(crew.told.released) == sorted(task.task_id for task in reply.groups[0].tasks)
    assert pool.held == {}


async def test_drivers_that_end_before_they_are_ready_end_the_worker_with_a_sentence(crew: Crew) -> None:
    async def unasked(request: DataRequest) -> DataReply:
        raise AssertionError("no driver was ready")

    crew.pool(unasked, "no_such_module_anywhere").take(claimed())
    error = await asyncio.wait_for(crew.told.failure, 100)
    assert isinstance(error, ConfigurationError)
    assert "before they are ready" in error.detail


def test_what_a_killed_worker_left_on_disk_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = Scratch()
    killed = "import os; from interlock.workers.scratch import Scratch; print(Scratch().path, flush=True); os._exit(9)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", killed], env=environment, capture_output=True, text=True, check=False)
    left = Path(said.stdout.strip())
    assert left.is_dir()
    (tmp_path / f"{PREFIX}being-made").mkdir()
    assert sweep() == 1
    assert (left.exists(), mine.path.is_dir(), (tmp_path / f"{PREFIX}being-made").is_dir()) == (False, True, True)
    mine.remove()
    assert not mine.path.exists()
