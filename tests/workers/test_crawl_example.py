"""The example in examples/crawl, against a local site."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from examples.crawl.crawl import crawl
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.workers import Worker
from tests.support.system import System
from tests.support.third_party_servers import Stranger, answer, stranger

FILLER = "<p>" + "long " * 500 + "</p>"


@pytest.fixture
async def site(shared: System, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stranger]:
    """A local site, to which the test adds pages, with a worker and the loops of a dispatcher."""
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(shared.kernel)]
    settings = Settings(
        internal_url=shared.internal_url,
        worker_token=SecretStr(shared.worker_token),
        outbound_allow=["127.0.0.1"],
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("politeness")))
        worker = Worker(settings, concurrency=1)
        running = asyncio.create_task(worker.run())
        async with stranger() as there:
            yield there
        worker.request_drain()
        worker.request_drain()
        await running
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


def page(*links: str) -> Any:
    anchors = "".join(f'<a href="{link}">x</a>' for link in links)
    return answer(f"<html>{FILLER}{anchors}</html>".encode())


async def test_site_is_crawled_once_however_its_pages_lead_to_each_other(shared: System, site: Stranger) -> None:
    site.says("/", page("/a", "b", "http://elsewhere.invalid/", "/missing"))
    site.says("/a", page("/", "/c#part", "/a?again"))
    site.says("/b", page("/c"))
    site.says("/c", page("/"))
    site.says("/a?again", page("/a"))
    async with Client(shared.gateway_url, shared.admin_key) as client:
        pages = await crawl(client, site.url("/"))
        assert sorted(pages) == sorted(site.url(path) for path in ("/", "/a", "/b", "/c", "/a?again"))
        assert all(found.status == 200 and FILLER in found.body for found in pages.values())
        asked = len(site.targets())
        assert asked == len(set(site.targets()))
        assert await crawl(client, site.url("/")) == {}, "all of it is known"
        receipt = await client.results.receipt("crawl", run=None)
    assert len(site.targets()) == asked
    assert receipt.receipt is not None
    assert receipt.receipt.complete
