"""Rules for new work: jobs with a list of tasks, submissions to existing jobs, and tasks without a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import rule

from interlock.apps.app import App
from interlock.tasks.idempotency import Repeat
from interlock.tasks.queue import enqueue
from interlock.tasks.shards import SMALL_SHARD, run_task_id
from interlock.wire.base import RunState
from interlock.wire.jobs import JobAccepted, JobRequest
from tests.model.dispatchers import Crashed
from tests.model.model_types import Definition, Job, Task
from tests.model.rule_base import Driven, Refused, chosen, dispatchers, often, picks, seldom
from tests.support.sharded_runs import into_shard

_IDEMPOTENCY = timedelta(hours=24)

definitions = st.builds(
    Definition,
    bulk=st.booleans(),
    max_attempts=st.integers(1, 3),
    backoff=st.sampled_from([0, 10]),
    jitter=st.sampled_from([0.0, 0.5]),
    fatal=st.sampled_from([(), ("Fatal",)]),
    lease=st.sampled_from([20, 40]),
    timeout=st.sampled_from([30, 90]),
    max_concurrency=st.sampled_from([None, None, None, 1, 2]),
    per_key=st.sampled_from([None, None, None, 1, 2]),
    outputs=st.booleans(),
)
# A dispatcher runs its own tasks concurrently: with a cap, it would be random which of them gets the slot.
inline_definitions = st.builds(
    Definition,
    runtime=st.just("dispatcher"),
    operator=st.sampled_from(["echo", "fail"]),
    max_attempts=st.integers(1, 2),
    backoff=st.sampled_from([0, 10]),
)
items = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from("xyz")), max_size=6)
names = st.sampled_from([None, "north", "north", "south"])
keys = st.sampled_from([None, None, "first", "second"])


@dataclass(frozen=True)
class Post:
    """A request, kept so that it can be repeated unchanged."""

    definition: Definition | None
    name: str | None
    items: tuple[tuple[str | None, str], ...]
    deduped: bool
    update: bool
    key: str | None

    @property
    def sharded(self) -> bool:
        """Decided by the items, so that a repeated request gives the same. Only for jobs without a cap.

        For a capped job it would be random which task of several shards gets a slot.
        """
        free = self.definition is not None and self.definition.max_concurrency is self.definition.per_key is None
        return free and self.name is None and not self.deduped and len(self.items) % 2 == 1

    @property
    def body(self) -> bytes:
        defined: dict[str, Any] = self.definition.body() if self.definition else {}
        more: dict[str, Any] = {"name": self.name} if self.name else {}
        if self.deduped:
            more["dedupe_by"] = "/id"
        tasks = [_payload(host, key) for host, key in self.items]
        return msgspec.json.encode(defined | more | {"tasks": tasks, "update": self.update})


def _payload(host: str | None, key: str) -> dict[str, Any]:
    return ({"host": host} if host else {}) | {"id": key}


@dataclass(frozen=True)
class Remembered:
    body: bytes
    answer: JobAccepted
    until: datetime


class Doors(Driven):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.posts: list[Post] = []
        self.remembered: dict[str, Remembered] = {}

    def begin(self, at: int, definition: Definition, listed: list[tuple[str | None, str]]) -> None:
        self.send(at, Post(definition, None, (*listed, ("a", "x")), deduped=False, update=False, key=None))

    @rule(
        at=dispatchers,
        definition=st.one_of(definitions, definitions, inline_definitions),
        name=names,
        listed=items,
        deduped=st.booleans(),
        update=st.booleans(),
        key=keys,
        crash=seldom,
    )
    def submit(
        self,
        at: int,
        definition: Definition,
        name: str | None,
        listed: list[tuple[str | None, str]],
        deduped: bool,
        update: bool,
        key: str | None,
        crash: bool,
    ) -> None:
        definition = self._in_the_same_runtime(name, definition)
        self.send(at, Post(definition, name, tuple(listed), deduped, update, key), crash=crash)

    @rule(at=dispatchers, pick=picks, name=names, listed=items, deduped=often, key=keys)
    def submit_more(
        self,
        at: int,
        pick: int,
        name: str | None,
        listed: list[tuple[str | None, str]],
        deduped: bool,
        key: str | None,
    ) -> None:
        """Submits to a job by its name; without a name, repeats an earlier request."""
        again = chosen(self.posts, pick)
        self.send(at, again if name is None else Post(None, name, tuple(listed), deduped, update=False, key=key))

    @rule(at=dispatchers, pick=picks, host=st.sampled_from(["a", "b"]))
    def make_a_task_of_no_run(self, at: int, pick: int, host: str) -> None:
        """Inserts a task as an event does: every statement of the kernel handles such tasks."""
        task = self._task(self.some_job(pick), UUID(int=1000 + self.made), None, (host, "event"), deduped=False)
        self.call(at, lambda kernel: self._insert(kernel, task))
        self.model.tasks.append(task)
        self.look(f"{task} of no run, {task.job}")

    async def _insert(self, kernel: App, task: Task) -> None:
        async with kernel.stores.database.transaction() as connection:
            ids = SMALL_SHARD, task.task_id, self.world.org_id, task.job.job_id
            await connection.execute(
                "insert into interlock.tasks"
                " (shard, task_id, org_id, job_id, max_attempts, priority, slot_key, payload)"
                " values ($1, $2, $3, $4, $5, $6, $7, $8)",
                *ids,
                task.max_attempts,
                int(task.bulk),
                task.slot_key,
                task.payload,
            )
            await enqueue(connection, [task.task_id], direct=kernel.settings.queue_direct)

    def replenish(self) -> None:
        self.send(0, Post(Definition(), None, (("a", "x"), ("b", "y")), deduped=False, update=False, key=None))

    # Parts of a submission

    def send(self, at: int, post: Post, *, crash: bool = False) -> None:
        self.clock.advance(0.001)
        request = msgspec.json.decode(post.body, type=JobRequest)
        place = ("submit.before_commit", "submit.committed")[len(post.items) % 2] if crash else None

        def work(kernel: App) -> Any:
            return kernel.jobs.submissions.submit(request, self.world.org_id, Repeat(post.key, post.body))

        try:
            answer = self.ask(at, work, crash=place)
        except Crashed:
            answer = None
            if place == "submit.committed":
                # Accepted, but the reply was lost: found by repeating the request, as a client without a reply must.
                answer = self._asked_again(at, post, work)
        if isinstance(answer, JobAccepted):
            self.posts.append(post)
        self._compare(post, answer)
        self.look(f"submit {post}: {answer}")

    def _asked_again(self, at: int, post: Post, work: Any) -> Any:
        if post.key is not None:
            return self.ask(at, work)
        row = self.world.select(
            "select * from interlock.runs where run_id <> all($1::uuid[])", [run.run_id for run in self.model.runs]
        )[0]
        seen = {"total": row["total"], "deduplicated": len(post.items) - row["total"], "state": RunState(row["state"])}
        return JobAccepted(job_id=row["job_id"], run_id=row["run_id"], tasks_url="", **seen)

    def _compare(self, post: Post, answer: Any) -> None:
        expected = self._refusal(post)
        if expected is not None:
            assert answer is None or answer == expected, f"{answer}, not {expected}"
            return
        if answer is None:
            return
        assert isinstance(answer, JobAccepted), f"refused: {answer}"
        known = self._known(post)
        if known is not None:
            assert answer == known.answer
            return
        self._accept(post, answer)
        if post.key is not None:
            self.remembered[post.key] = Remembered(post.body, answer, self.model.now + _IDEMPOTENCY)

    def _known(self, post: Post) -> Remembered | None:
        known = self.remembered.get(post.key or "")
        return known if known and known.until > self.model.now else None

    def _refusal(self, post: Post) -> Refused | None:
        known = self._known(post)
        if known is not None:
            return Refused("idempotency_key_reused") if known.body != post.body else None
        job = self.model.job_named(post.name)
        if post.definition is None:
            return Refused("not_found") if job is None else None
        differs = job is not None and job.definition != post.definition
        return Refused("job_differs") if differs and not post.update else None

    def _accept(self, post: Post, accepted: JobAccepted) -> None:
        job = self.model.job_named(post.name)
        fresh = self.model.fresh_items(job, [key if post.deduped else None for _, key in post.items])
        actual, expected = (accepted.total, accepted.deduplicated), (len(fresh), len(post.items) - len(fresh))
        assert actual == expected, f"tasks made and deduplicated: {actual}, not {expected}"
        if post.definition is not None:
            job = self.model.define(accepted.job_id, post.name, post.definition)
        assert job is not None
        assert job.job_id == accepted.job_id
        tasks = [
            self._task(job, run_task_id(accepted.run_id, index), index, post.items[index], deduped=post.deduped)
            for index in fresh
        ]
        if post.sharded:
            self.call(0, lambda kernel: _into_shard(kernel, accepted.run_id))
        run = self.model.start_run(accepted.run_id, job, tasks, len(post.items))
        assert accepted.state == run.state

    def _task(self, job: Job, task_id: UUID, index: int | None, item: tuple[str | None, str], *, deduped: bool) -> Task:
        host, key = item
        definition = job.definition
        self.made += 1
        return Task(
            task_id,
            job,
            number=self.made,
            index=index,
            payload=msgspec.json.encode(_payload(host, key)).decode(),
            slot_key=host if definition.per_key is not None else None,
            dedupe_key=key if deduped else None,
            bulk=definition.bulk,
            max_attempts=definition.max_attempts,
            queued_at=self.model.now,
        )

    def _in_the_same_runtime(self, name: str | None, definition: Definition) -> Definition:
        """Keeps runtime and lease of an existing job.

        An update must not move a job to another queue, because its messages would stay behind. Nor may it shorten
        leases, because an existing alarm keeps its time.
        """
        job = self.model.job_named(name)
        if job is None:
            return definition
        if job.definition.queue is None:
            definition = replace(definition, max_concurrency=None, per_key=None)
        kept = job.definition
        return replace(definition, runtime=kept.runtime, operator=kept.operator, lease=kept.lease, timeout=kept.timeout)


async def _into_shard(kernel: App, run_id: UUID) -> None:
    async with kernel.stores.database.transaction() as connection:
        await into_shard(connection, run_id)
