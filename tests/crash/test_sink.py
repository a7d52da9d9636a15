"""Sinks that kill themselves at every step, and others that continue concurrently."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import copied
from tests.crash.seed import ROUNDS, random_for
from tests.support.buffered_datasets import Dataset, Depot, depot, is_there, row
from tests.support.deployment import Process
from tests.support.polls import answered

CASES = {
    ("sink", point)
    for point in (
        "sink.received",
        "sink.before_data_commit",
        "sink.data_committed",
        "sink.before_state_commit",
        "sink.state_committed",
        "sink.before_refusal_commit",
        "sink.before_handover_commit",
        "buffer_sweep.taken",
        "buffer_sweep.before_forgotten",
    )
}


@pytest.fixture
async def site(postgres_url: str, template: str, tmp_path: Path) -> AsyncIterator[Depot]:
    async with copied(postgres_url, template) as url, depot(postgres_url, url, tmp_path) as made:
        yield made


def _sink(site: Depot, name: str, folder: Path) -> Process:
    settings = {
        "state_url": site.system.kernel.settings.state_url.get_secret_value(),  # type: ignore[union-attr]
        "data_url": site.data_url,
        "objects_url": site.system.kernel.settings.objects_root,
        "buffer_keep_seconds": "0",
        "sweep_seconds": "0.1",
    }
    return Process(name, ["serve", "sink", "--dir", str(folder)], settings, folder / f"{name}.stderr")


async def _visible(site: Depot) -> None:
    """Makes messages of a dead sink visible now, and makes the files that it would have deleted due now."""
    await site.visible()
    await site.system.value(
        "update interlock.buffer_publishes set sweep_at = interlock.clock()"
        " where sweep_at is not null and status = 'Loaded'"
    )


async def test_sinks_that_die_anywhere_load_every_batch_once(site: Depot, tmp_path: Path) -> None:
    chance = random_for("sinks")
    first, last = await site.deploy("first"), await site.deploy("last", on_conflict="update")
    points = sorted(point for _, point in CASES) * ROUNDS
    chance.shuffle(points)
    pairs: list[tuple[Dataset, dict[str, dict[int, str]]]] = [(first, {}), (last, {})]
    bad: list[str] = []
    victim, other = _sink(site, "victim", tmp_path), _sink(site, "other", tmp_path)
    try:
        for number, point in enumerate(points):
            for dataset, known in pairs:
                rows = [row(chance.randint(0, 20), name=f"{number}") for _ in range(5)]
                unique = list({each["id"]: each for each in rows}.values())
                known[await dataset.publish(unique)] = {each["id"]: each["name"] for each in unique}
            bad.append(await first.publish([row(1, small="x")]))
            await victim.start(f"{point}=kill", **(await _for_spark(site) if "handover" in point else {}))
            await victim.killed_itself()
            await _visible(site)
        await victim.start()
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        await other.start(sink_metrics=address)
        await answered(lambda: _settled(site))
        for dataset, known in pairs:
            await _check(site, dataset, known)
        for publish_id in bad:
            assert (await site.buffer(publish_id))["status"] == "Refused"
        headers = {"Authorization": f"Bearer {site.system.admin_key}"}
        metrics = await site.system.http.get(f"http://{address}/metrics", headers=headers)
        assert "interlock_sink_batches_total" in metrics.text
        assert await victim.stop() == 0
        assert await other.stop() == 0
    finally:
        await victim.give_up()
        await other.give_up()


async def _for_spark(site: Depot) -> dict[str, str]:
    """Configures a sink to leave all batches to Spark, and registers a Spark worker."""
    await site.system.value(
        "insert into interlock.workers (worker_id, queue, last_seen_at) values ('w', 'spark', interlock.clock())"
        " on conflict (worker_id, queue) do update set last_seen_at = excluded.last_seen_at"
    )
    return {"sink_spark_bytes": "1"}


async def _settled(site: Depot) -> bool:
    await _visible(site)
    left: Any = await site.system.value(
        "select count(*) from interlock.buffer_publishes"
        " where status = 'Pending' or (status = 'Loaded' and sweep_at is not null)"
    )
    return bool(left == 0)


async def _check(site: Depot, dataset: Dataset, known: dict[str, dict[int, str]]) -> None:
    views = {publish_id: await site.buffer(publish_id) for publish_id in known}
    assert {view["status"] for view in views.values()} == {"Loaded"}
    assert sorted(await dataset.events()) == list(range(1, len(known) + 1))
    update = dataset.dag == "last"
    expected: dict[int, str] = {}
    for publish_id in sorted(known, key=lambda one: one if update else -views[one]["batch"]):
        expected |= known[publish_id]
    assert {one["id"]: one["name"] for one in await dataset.rows("id, name")} == expected
    assert not any(is_there(view["batch_uri"]) for view in views.values())
