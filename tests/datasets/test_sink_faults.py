"""The sink while stores are unavailable, and through any sequence of publishes, deliveries and crashes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from interlock import failpoints
from interlock.apps.sink import sink
from interlock.settings import BUFFER_QUEUE
from interlock.stores.embedded import EmbeddedPostgres
from tests.conftest import copied
from tests.support.buffered_datasets import Dataset, Depot, depot, row

POINTS = ["sink.received", "sink.before_data_commit", "sink.data_committed", "sink.before_state_commit",
          "sink.state_committed"]  # fmt: skip


@pytest.fixture(scope="module")
async def site(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Depot]:
    async with (
        copied(postgres_url, template) as url,
        depot(postgres_url, url, tmp_path_factory.mktemp("sink"), sink_tries=3) as made,
    ):
        yield made


@pytest.fixture(scope="module")
async def loop_of_tests() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_batches_wait_while_the_data_database_restarts(site: Depot) -> None:
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        server = EmbeddedPostgres(Path(folder) / "data", name="data", log=Path(folder) / "data.log")
        url = await server.start()
        dataset = await site.deploy("restarts")
        changed = site.system.kernel.settings.model_copy(update={"data_url": SecretStr(url)})
        async with sink(changed, wait_seconds=0) as (loads, *_):
            await dataset.publish([row(1)])
            assert await loads.run_once() == 1
            publish_id = await dataset.publish([row(2)])
            await server.stop()
            assert await loads.run_once() == 1
            assert (await site.buffer(publish_id))["status"] == "Pending"
            assert await server.start() == url
            await site.visible()
            assert await loads.run_once() == 1
            connection = await asyncpg.connect(url)
            assert await connection.fetchval(f"select array_agg(id order by id) from {dataset.table}") == [1, 2]
            await connection.close()
        await server.stop()
    assert (await site.buffer(publish_id))["status"] == "Loaded"
    assert await dataset.events() == [1, 2]


async def test_connection_lost_before_the_commit_loads_nothing_until_a_retry(site: Depot) -> None:
    dataset = await site.deploy("breaks")
    publish_id = await dataset.publish([row(1)])

    async def cut() -> None:
        failpoints.disarm("sink.before_data_commit")
        await site.data.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'interlock sink' and datname = current_database()"
        )

    failpoints.arm("sink.before_data_commit", cut)
    assert await site.pass_of() == 1
    assert (await site.buffer(publish_id))["status"] == "Pending"
    assert await dataset.rows("id") == []
    await site.visible()
    await site.drain()
    assert [one["id"] for one in await dataset.rows("id")] == [1]
    assert await dataset.events() == [1]


async def test_lasting_failure_is_given_up_and_can_be_redriven(site: Depot) -> None:
    dataset = await site.deploy("lasts")
    publish_id = await dataset.publish([row(1)])

    async def fail() -> None:
        raise failpoints.FailpointError("sink.before_data_commit")

    failpoints.arm("sink.before_data_commit", fail)
    try:
        for _ in range(3):
            assert (await site.buffer(publish_id))["status"] == "Pending"
            await site.visible()
            await site.pass_of()
    finally:
        failpoints.disarm("sink.before_data_commit")
    view = await site.buffer(publish_id)
    assert (view["status"], view["refusal"]["code"]) == ("Failed", "internal")
    assert "after 3 tries" in view["refusal"]["detail"]
    assert (await site.system.user("POST", f"/v1/buffers/{publish_id}/redrive")).status_code == 200
    await site.drain()
    assert (await site.buffer(publish_id))["status"] == "Loaded"


async def test_redrive_that_fails_before_its_commit_changes_nothing(site: Depot) -> None:
    dataset = await site.deploy("redriven")
    publish_id = await dataset.publish(None)
    await site.drain()

    async def fail() -> None:
        failpoints.disarm("buffer_redrive.before_commit")
        raise failpoints.FailpointError("buffer_redrive.before_commit")

    failpoints.arm("buffer_redrive.before_commit", fail)
    assert (await site.system.user("POST", f"/v1/buffers/{publish_id}/redrive")).status_code == 500
    assert (await site.buffer(publish_id))["redrives"] == 0
    assert await site.pass_of() == 0


# Any sequence


class Crash(BaseException):
    """Interrupts the current operation as SIGKILL would: no handler of the sink catches it."""


batches = st.lists(st.integers(0, 6), min_size=0, max_size=4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), batches),
        st.tuples(st.just("pass"), st.none()),
        st.tuples(st.just("crash"), st.sampled_from(POINTS)),
        st.tuples(st.just("repeat"), st.none()),
        st.tuples(st.just("bad"), st.none()),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=steps, update=st.booleans())
def test_any_sequence_loads_each_batch_once_with_one_event(
    site: Depot, loop_of_tests: asyncio.AbstractEventLoop, plan: list[tuple[str, Any]], update: bool
) -> None:
    loop_of_tests.run_until_complete(_followed(site, plan, update=update))


async def _followed(site: Depot, plan: list[tuple[str, Any]], *, update: bool) -> None:
    dataset = await site.deploy(f"m{uuid4().hex[:10]}", on_conflict="update" if update else "nothing")
    good: dict[str, dict[int, str]] = {}
    bad: list[str] = []
    for number, (what, detail) in enumerate(plan):
        if what == "publish":
            keys = detail if update else list(dict.fromkeys(detail))
            rows = [row(key, name=f"{number}.{at}") for at, key in enumerate(keys)]
            good[await dataset.publish(rows)] = {each["id"]: each["name"] for each in rows}
        elif what == "bad":
            bad.append(await dataset.publish([row(0, small="x")]))
        elif what == "repeat":
            await _repeat(site)
        else:
            await _pass(site, detail)
    await site.visible()
    await site.drain()
    await _check(site, dataset, good, bad, update=update)


async def _repeat(site: Depot) -> None:
    await site.system.value(
        "insert into interlock.queue_messages (queue, body) select queue, body from interlock.queue_messages"
        " where queue = $1",
        BUFFER_QUEUE,
    )
    await site.visible()


async def _pass(site: Depot, point: str | None) -> None:
    if point is None:
        await site.pass_of()
        return

    async def crash() -> None:
        raise Crash

    failpoints.arm(point, crash)
    try:
        await site.pass_of()
    except Crash:
        await site.visible()
    finally:
        failpoints.disarm(point)


async def _check(
    site: Depot, dataset: Dataset, good: dict[str, dict[int, str]], bad: list[str], *, update: bool
) -> None:
    views = {publish_id: await site.buffer(publish_id) for publish_id in good}
    assert {view["status"] for view in views.values()} <= {"Loaded"}
    assert {(await site.buffer(publish_id))["status"] for publish_id in bad} <= {"Refused"}
    numbers = sorted(view["batch"] for view in views.values())
    assert numbers == list(range(1, len(good) + 1))
    assert sorted(await dataset.events()) == numbers
    expected: dict[int, str] = {}
    order = sorted(good, key=lambda one: one if update else -views[one]["batch"])
    for publish_id in order:
        expected |= good[publish_id]
    if good:
        assert {one["id"]: one["name"] for one in await dataset.rows("id, name")} == expected
