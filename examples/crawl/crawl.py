"""Crawls a site from a start page: python crawl.py http://127.0.0.1:8000/

Each depth is a run of one named job. Its tasks are URLs, fetched by `http_fetch`; because of `dedupe_by`, no page is
fetched twice, even by a later run. The links in the resulting pages are the tasks of the next run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable
from html.parser import HTMLParser
from urllib.parse import urldefrag, urljoin, urlsplit

import msgspec

from interlock.client import Client
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import Policy

MAX_DEPTH = 10
AT_ONCE = 16


class Page(msgspec.Struct):
    """The fields of an `http_fetch` result that the crawl needs."""

    url: str
    status: int
    bytes: int
    body: str = ""


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


async def crawl(client: Client, start: str, *, job: str = "crawl") -> dict[str, Page]:
    """Returns all reachable pages of the site, by URL."""
    pages: dict[str, Page] = {}
    wanted = {start}
    for _ in range(MAX_DEPTH):
        wanted -= pages.keys()
        if not wanted:
            break
        found = [page async for page in fetched(client, sorted(wanted), job)]
        pages |= {page.url: page for page in found}
        wanted = {link for page in found for link in links_of(page) if same_site(link, start)}
    return pages


async def fetched(client: Client, urls: Iterable[str], job: str) -> AsyncIterator[Page]:
    accepted = await client.submit(
        [{"url": url} for url in urls],
        name=job,
        operator="http_fetch",
        config={"max_per_host": 4, "max_bytes": 4 << 20},
        policy=Policy(max_attempts=5, backoff_seconds=1),
        dedupe_by="/url",
    )
    run = await client.wait(accepted.run_id)
    print(f"run {run.run_id}: {run.counts.Completed} pages, {run.counts.dead} failed")
    places = asyncio.Semaphore(AT_ONCE)

    async def body(index: int) -> Page:
        """Fetches one long result. `interlock job export` returns all of them as files."""
        async with places:
            return msgspec.json.decode(await client.results.result(run.run_id, index), type=Page)

    tasks = [task async for task in client.tasks(run=run.run_id, status=TaskStatus.COMPLETED)]
    for page in await asyncio.gather(*(body(task.index or 0) for task in tasks)):
        yield page


def links_of(page: Page) -> set[str]:
    reader = Links()
    reader.feed(page.body)
    return {urldefrag(urljoin(page.url, link)).url for link in reader.found}


def same_site(url: str, start: str) -> bool:
    return urlsplit(url)[:2] == urlsplit(start)[:2]


async def main(start: str) -> None:
    gateway, key = os.environ["INTERLOCK_GATEWAY_URL"], os.environ["INTERLOCK_API_KEY"]
    async with Client(gateway, key) as client:
        pages = await crawl(client, start)
    for url, page in sorted(pages.items()):
        print(f"{page.status} {page.bytes:>8} {url}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
