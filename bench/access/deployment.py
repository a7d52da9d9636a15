"""The deployed DAG, the attempts that query and publish, and the parts that run in-process to be timed."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch
from uuid import UUID

import asyncpg
import msgspec
import psutil
from pydantic import SecretStr

from bench.harness import Installation
from bench.spark.source import DAG, Pipeline, release_of
from interlock.client import Fence, TaskClient, WorkerClient
from interlock.settings import Settings
from interlock.wire.attempts import ClaimReply, ClaimRequest, WriteGrant
from interlock.wire.dags import SourceEvent

COLUMNS: Final = (
    "block_number: bigint not null, log_index: int not null, block_timestamp: timestamp not null, "
    "transaction_hash: string not null, address: string not null, topic0: string not null, value: bigint not null"
)
TEXT: Final = """
name: {dag}
defaults: {{ heartbeat_timeout_seconds: 3600, timeout_seconds: 7200 }}
jobs:
  - {{ name: probe, activation: source, source: {{ kind: manual }}, operator: echo, outputs: [logs] }}
  - {{ name: feed, activation: source, source: {{ kind: manual }}, operator: echo, outputs: [logs] }}
  - {{ name: ask, operator: echo, inputs: [{{ from: {{ job: feed, output: logs }} }}], outputs: [answers] }}
{producers}
"""
"""The platform runtime has no workers: the benchmark plays their role."""
_PRODUCER: Final = """
  - name: {name}
    activation: source
    source: {{ kind: manual }}
    operator: echo
    outputs:
      - {{ name: logs, storage: buffered, unique_key: [block_number, log_index], columns: {{ {columns} }} }}
"""


def dag(producers: Sequence[str]) -> str:
    jobs = "".join(_PRODUCER.format(name=name, columns=COLUMNS) for name in producers)
    return TEXT.format(dag=DAG, producers=jobs)


@dataclass(frozen=True)
class Held:
    """A claimed attempt of a task, and its client."""

    claim: ClaimReply
    client: TaskClient

    @property
    def grant(self) -> WriteGrant:
        assert self.claim.task
        return self.claim.task.outputs[0]


@dataclass(frozen=True)
class AccessBench:
    here: Installation
    state: asyncpg.Connection[Any]
    data: asyncpg.Connection[Any]
    worker: WorkerClient

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.here, self.state, self.worker)

    @property
    def settings(self) -> Settings:
        """Returns the settings of the installation's own processes."""
        info = self.here.info
        return Settings(
            dir=self.here.directory,
            state_url=SecretStr(info["state_url"]),
            data_url=SecretStr(info["data_url"]),
            log_level="warning",
        )

    async def attempts(self, job: str, count: int) -> list[Held]:
        """Starts and claims `count` tasks of a source."""
        events = [SourceEvent(payload=msgspec.Raw(b'{"n":%d}' % number)) for number in range(count)]
        async with self.here.client() as client:
            await client.sources.send(DAG, job, events)
        return [await self.held(task_id) for task_id in (await self.pipeline.tasks(job, count))[:count]]

    async def held(self, task_id: UUID) -> Held:
        (claim,) = (await self.worker.claim(ClaimRequest(worker_id="bench", task_ids=[task_id]))).claims
        assert claim.capability_token
        fence = release_of(claim)
        client = TaskClient(
            self.here.info["internal"],
            claim.capability_token,
            Fence(fence.task_id, fence.attempt, fence.lease_token),
            query_url=self.here.info["query"],
        )
        return Held(claim, client)

    @contextmanager
    def without(self, process: str) -> Iterator[None]:
        """Suspends a process of the installation, so that its work can be done in this process."""
        supervisor = json.loads((self.here.directory / "endpoints.json").read_text())["pid"]
        children = psutil.Process(int(supervisor)).children()
        (stopped,) = [one for one in children if one.cmdline()[3:6] == ["interlock.cli", "serve", process]]
        stopped.suspend()
        try:
            yield
        finally:
            stopped.resume()


Steps = Mapping[str, Sequence[tuple[Any, str]]]
"""Functions and methods of each step, as (owner, name)."""


@dataclass
class Stopwatch:
    """Seconds per named step. Concurrent steps are counted separately."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name].append(time.perf_counter() - began)

    @contextmanager
    def around(self, steps: Steps) -> Iterator[None]:
        """Times these functions wherever they are called."""
        with ExitStack() as patched:
            for step, functions in steps.items():
                for owner, name in functions:
                    patched.enter_context(patch.object(owner, name, self._timed(step, getattr(owner, name))))
            yield

    def _timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            with self.step(step):
                return function(*arguments, **options)

        @functools.wraps(function)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            with self.step(step):
                return await function(*arguments, **options)

        return awaited if inspect.iscoroutinefunction(function) else called
