"""The public gateway: jobs, runs, tasks, queues, principals, secrets and bundles, one method per endpoint."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, TypedDict, TypeVar, Unpack
from uuid import UUID, uuid4

import msgspec
from msgspec import Raw

from interlock.client._bulk import BulkCalls
from interlock.client._bus_registry import BusOperationCalls, RegistryCalls, ReplayCalls
from interlock.client._caller import Caller, bearer, path, query
from interlock.client._dags import BackfillCalls, DagCalls, SourceCalls
from interlock.client._datasets import BufferCalls, DatasetCalls, QueryCalls
from interlock.client._http import refuse_line_breaks
from interlock.client._lists import ListCalls
from interlock.client._logs import LogCalls
from interlock.client._results import ResultCalls
from interlock.client._webhooks import WebhookCalls
from interlock.wire.access import (
    Health,
    KeyCreated,
    KeyList,
    KeyRequest,
    KeyView,
    MemberPage,
    MemberRequest,
    MemberView,
    OrgOperators,
    OrgOperatorsRequest,
    OrgRequest,
    OrgSecretPage,
    OrgSecretRequest,
    OrgSecretView,
    OrgView,
    SigningKeyView,
    WorkerList,
    WorkerTokenCreated,
    WorkerTokenList,
    WorkerTokenRequest,
    WorkerTokenView,
)
from interlock.wire.base import Priority, RunState, TaskStatus
from interlock.wire.bundles import BundlePage, BundleView
from interlock.wire.dags import PausePage
from interlock.wire.jobs import (
    DatasetRef,
    JobAccepted,
    JobPage,
    JobRequest,
    JobView,
    Policy,
    RunLimits,
    RunPage,
    RunView,
    Scaling,
)
from interlock.wire.sessions import SignInLink
from interlock.wire.tasks import (
    AttemptPage,
    CancelRequest,
    Changed,
    DeadMessagePage,
    Explanation,
    QueueList,
    RedriveRequest,
    TaskPage,
    TaskView,
)

PATIENCE_SECONDS = 5.0
PAGE: Final = 100

T = TypeVar("T")
Page = TypeVar("Page", JobPage, RunPage, TaskPage)

ENDED = frozenset({RunState.COMPLETED, RunState.COMPLETED_WITH_FAILURES, RunState.FAILED, RunState.CANCELED})


class JobOptions(TypedDict, total=False):
    """Options of `submit`; `interlock.wire.JobRequest` documents each one."""

    operator: str | None
    name: str | None
    runtime: str
    config: dict[str, Any]
    policy: Policy
    scaling: Scaling
    limits: RunLimits
    retention_days: float | None
    priority: Priority
    outputs: list[DatasetRef]
    dedupe_by: str | None
    update: bool


class TaskFilter(TypedDict, total=False):
    """Selects tasks by job (id or name), run and status."""

    job: str | UUID | None
    run: str | UUID | None
    status: TaskStatus | None


_raw = msgspec.json.Encoder()


class Client:
    """A client of the gateway, authenticated by an API key.

        async with Client("http://127.0.0.1:7070", key) as client:
            job = await client.submit([{"n": 1}, {"n": 2}], operator="echo")
            run = await client.wait(job.run_id)

    A call that fails because the server is unreachable is retried for `patience` seconds, unless a retry could
    execute it twice. Every error is one of `interlock.errors`.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        verify: ssl.SSLContext | bool = True,
        patience: float = PATIENCE_SECONDS,
        org: str | None = None,
    ) -> None:
        self._caller = Caller(url, bearer(api_key, org), verify=verify, patience=patience)
        self.dags = DagCalls(self._caller)
        self.bundles = BundleCalls(self._caller)
        self.lists = ListCalls(self._caller, verify)
        self.logs = LogCalls(self._caller)
        self.webhooks = WebhookCalls(self._caller)
        self.secrets = SecretCalls(self._caller)
        self.registry = RegistryCalls(self._caller)
        self.datasets = DatasetCalls(self._caller)
        self.backfills = BackfillCalls(self._caller)
        self.bulk = BulkCalls(self._caller)
        self.sources = SourceCalls(self._caller)
        self.queries = QueryCalls(self._caller)
        self.buffers = BufferCalls(self._caller)
        self.results = ResultCalls(self._caller)
        self.bus = BusOperationCalls(self._caller)
        self.replays = ReplayCalls(self._caller)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()

    async def _get(self, target: str, kind: type[T]) -> T:
        return await self._caller.call("GET", target, kind)

    async def _post(self, target: str, kind: type[T], body: Any = None, *, repeatable: bool = True) -> T:
        return await self._caller.call("POST", target, kind, body, repeatable=repeatable)

    async def health(self) -> Health:
        return await self._get("/healthz", Health)

    async def sign_in_link(self) -> SignInLink:
        """Creates a link that signs its first visitor in to the dashboard with this client's API key."""
        return await self._post("/v1/sign-in-links", SignInLink, repeatable=False)

    # Jobs and runs

    async def submit(
        self, tasks: Iterable[Any], *, idempotency_key: str | None = None, **options: Unpack[JobOptions]
    ) -> JobAccepted:
        """Submits a closed list of tasks. A payload is any JSON value; `msgspec.Raw` is sent unchanged.

        Without an `idempotency_key` the client generates one, so a retry after a lost reply submits nothing twice.
        """
        raws = [task if isinstance(task, Raw) else Raw(_raw.encode(task)) for task in tasks]
        return await self.submit_request(JobRequest(tasks=raws, **options), idempotency_key=idempotency_key)

    async def submit_request(self, request: JobRequest, *, idempotency_key: str | None = None) -> JobAccepted:
        key = idempotency_key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        extra = f"Idempotency-Key: {key}\r\n"
        return await self._caller.call("POST", "/v1/jobs", JobAccepted, request, extra=extra)

    async def job(self, job_id: UUID | str) -> JobView:
        return await self._get(path("v1", "jobs", job_id), JobView)

    async def job_page(self, cursor: str | None = None, limit: int = PAGE) -> JobPage:
        return await self._get(query("/v1/jobs", cursor=cursor, limit=limit), JobPage)

    async def jobs(self, page_size: int = PAGE) -> AsyncIterator[JobView]:
        async for page in _pages(lambda cursor: self.job_page(cursor, page_size)):
            for job in page.jobs:
                yield job

    async def run_page(self, job_id: UUID | str, cursor: str | None = None, limit: int = PAGE) -> RunPage:
        return await self._get(query(path("v1", "jobs", job_id, "runs"), cursor=cursor, limit=limit), RunPage)

    async def runs(self, job_id: UUID | str, page_size: int = PAGE) -> AsyncIterator[RunView]:
        async for page in _pages(lambda cursor: self.run_page(job_id, cursor, page_size)):
            for run in page.runs:
                yield run

    async def run_list(
        self,
        cursor: str | None = None,
        limit: int = PAGE,
        *,
        job: UUID | str | None = None,
        state: RunState | None = None,
    ) -> RunPage:
        """Returns runs of a job, or of all jobs, newest first."""
        return await self._get(query("/v1/runs", job=job, state=state, cursor=cursor, limit=limit), RunPage)

    async def run(self, run_id: UUID | str) -> RunView:
        return await self._get(path("v1", "runs", run_id), RunView)

    async def pause_job(self, job_id: UUID | str) -> JobView:
        """Pauses a job. Running tasks continue; no other task of it starts."""
        return await self._post(path("v1", "jobs", job_id, "pause"), JobView)

    async def resume_job(self, job_id: UUID | str) -> JobView:
        return await self._post(path("v1", "jobs", job_id, "resume"), JobView)

    async def cancel_job(self, job_id: UUID | str) -> JobView:
        """Cancels the job's runs that have not ended."""
        return await self._post(path("v1", "jobs", job_id, "cancel"), JobView)

    async def delete_job(self, job_id: UUID | str) -> JobView:
        """Deletes a job with its runs, tasks and results, in whatever state they are."""
        return await self._caller.call("DELETE", path("v1", "jobs", job_id), JobView, repeatable=False)

    async def cancel_run(self, run_id: UUID | str) -> Changed:
        return await self._post(path("v1", "runs", run_id, "cancel"), Changed)

    async def wait(
        self,
        run_id: UUID | str,
        on_progress: Callable[[RunView], None] | None = None,
        poll_seconds: float = 0.2,
    ) -> RunView:
        """Polls until the run has ended and returns it. Each poll, the last included, calls `on_progress`."""
        while True:
            run = await self.run(run_id)
            if on_progress is not None:
                on_progress(run)
            if run.state in ENDED:
                return run
            await asyncio.sleep(poll_seconds)

    # Tasks

    async def task(self, task_id: UUID | str) -> TaskView:
        return await self._get(path("v1", "tasks", task_id), TaskView)

    async def task_page(self, cursor: str | None = None, limit: int = PAGE, **which: Unpack[TaskFilter]) -> TaskPage:
        return await self._get(query("/v1/tasks", **which, cursor=cursor, limit=limit), TaskPage)

    async def tasks(self, page_size: int = PAGE, **which: Unpack[TaskFilter]) -> AsyncIterator[TaskView]:
        """Yields every matching task and fetches pages as needed."""
        async for page in _pages(lambda cursor: self.task_page(cursor, page_size, **which)):
            for task in page.tasks:
                yield task

    async def attempts(self, task_id: UUID | str) -> AttemptPage:
        return await self._get(path("v1", "tasks", task_id, "attempts"), AttemptPage)

    async def explain(self, task_id: UUID | str) -> Explanation:
        return await self._get(path("v1", "tasks", task_id, "explain"), Explanation)

    async def cancel_task(self, task_id: UUID | str) -> TaskView:
        return await self._post(path("v1", "tasks", task_id, "cancel"), TaskView)

    async def retry_task(self, task_id: UUID | str) -> TaskView:
        return await self._post(path("v1", "tasks", task_id, "retry"), TaskView, repeatable=False)

    async def cancel_tasks(self, *, dry_run: bool = False, **which: Unpack[TaskFilter]) -> Changed:
        job, run = which.get("job"), which.get("run")
        request = CancelRequest(
            job=None if job is None else str(job),
            run=None if run is None else str(run),
            status=which.get("status"),
            dry_run=dry_run,
        )
        return await self._post("/v1/tasks/cancel", Changed, request)

    async def redrive_tasks(self, request: RedriveRequest) -> Changed:
        return await self._post("/v1/tasks/redrive", Changed, request, repeatable=False)

    # Queues and workers

    async def queues(self) -> QueueList:
        return await self._get("/v1/queues", QueueList)

    async def dead_letters(self, queue: str, limit: int = PAGE) -> DeadMessagePage:
        target = query(path("v1", "queues", queue, "dead-letters"), limit=limit)
        return await self._get(target, DeadMessagePage)

    async def redrive_queue(self, queue: str) -> Changed:
        return await self._post(path("v1", "queues", queue, "redrive"), Changed, repeatable=False)

    async def pause_page(self, cursor: str | None = None, limit: int = PAGE) -> PausePage:
        """Returns jobs that are paused because a downstream queue is too long."""
        return await self._get(query("/v1/pauses", cursor=cursor, limit=limit), PausePage)

    async def workers(self) -> WorkerList:
        return await self._get("/v1/workers", WorkerList)

    # Principals. A call that shows a secret once is not retried: the secret of a lost reply cannot be read again.

    async def keys(self) -> KeyList:
        return await self._get("/v1/keys", KeyList)

    async def create_key(self, request: KeyRequest) -> KeyCreated:
        return await self._post("/v1/keys", KeyCreated, request, repeatable=False)

    async def revoke_key(self, key_id: str) -> KeyView:
        return await self._delete(path("v1", "keys", key_id), KeyView)

    async def member_page(self, cursor: str | None = None, limit: int = PAGE, *, org: str | None = None) -> MemberPage:
        """Returns the users of the identity provider who have access."""
        target = query("/v1/members", org=org, cursor=cursor, limit=limit)
        return await self._get(target, MemberPage)

    async def allow_member(self, request: MemberRequest) -> MemberView:
        return await self._post("/v1/members", MemberView, request)

    async def disallow_member(self, subject: str, *, org: str | None = None) -> MemberView:
        return await self._delete(query("/v1/members", subject=subject, org=org), MemberView)

    async def worker_tokens(self) -> WorkerTokenList:
        return await self._get("/v1/worker-tokens", WorkerTokenList)

    async def create_worker_token(self, request: WorkerTokenRequest) -> WorkerTokenCreated:
        kind = WorkerTokenCreated
        return await self._post("/v1/worker-tokens", kind, request, repeatable=False)

    async def revoke_worker_token(self, token_id: str) -> WorkerTokenView:
        return await self._delete(path("v1", "worker-tokens", token_id), WorkerTokenView)

    async def org_operators(self, org: str) -> OrgOperators:
        """Returns the operators that an org may use. Needs the platform scope."""
        return await self._get(path("v1", "orgs", org, "operators"), OrgOperators)

    async def limit_org_operators(self, org: str, operators: list[str] | None) -> OrgOperators:
        """Limits an org to these operators; None allows all. Needs the platform scope."""
        request, kind = OrgOperatorsRequest(operators=operators), OrgOperators
        return await self._post(path("v1", "orgs", org, "operators"), kind, request)

    async def create_org(self, name: str) -> OrgView:
        kind = OrgView
        return await self._post("/v1/orgs", kind, OrgRequest(name=name), repeatable=False)

    async def signing_keys(self) -> list[SigningKeyView]:
        return await self._get("/v1/signing-keys", list[SigningKeyView])

    async def rotate_signing_key(self) -> SigningKeyView:
        kind = SigningKeyView
        return await self._post("/v1/signing-keys/rotate", kind, repeatable=False)

    async def _delete(self, target: str, kind: type[T]) -> T:
        return await self._caller.call("DELETE", target, kind)


async def _pages(read: Callable[[str | None], Awaitable[Page]]) -> AsyncIterator[Page]:
    """Yields pages until one has no `next_cursor`. A page in between may be empty."""
    cursor: str | None = None
    while True:
        page = await read(cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return


class SecretCalls:
    """`client.secrets`, for admins of the org."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def set(self, name: str, value: str, *, hosts: Iterable[str] = ()) -> OrgSecretView:
        """Sets the value and the hosts that it may be sent to. Without hosts, it may be sent to any."""
        request = OrgSecretRequest(value=value, hosts=list(hosts))
        return await self._caller.call("PUT", path("v1", "secrets", name), OrgSecretView, request)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> OrgSecretPage:
        return await self._caller.call("GET", query("/v1/secrets", cursor=cursor, limit=limit), OrgSecretPage)

    async def remove(self, name: str) -> OrgSecretView:
        return await self._caller.call("DELETE", path("v1", "secrets", name), OrgSecretView, repeatable=False)


_UPLOAD_SECONDS: Final = 300.0


class BundleCalls:
    """A bundle is identified by its name or by a prefix of its digest."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def upload(self, content: bytes, *, name: str | None = None) -> BundleView:
        """Uploads a bundle. Idempotent: equal content is the same bundle. `name`, if in use, moves to this bundle."""
        target = query("/v1/bundles", name=name)
        async with self._caller.sending("application/zip") as caller:
            return await caller.call("POST", target, BundleView, Raw(content), timeout=_UPLOAD_SECONDS)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> BundlePage:
        return await self._caller.call("GET", query("/v1/bundles", cursor=cursor, limit=limit), BundlePage)

    async def bundle(self, which: str) -> BundleView:
        return await self._caller.call("GET", path("v1", "bundles", which), BundleView)

    async def delete(self, which: str) -> BundleView:
        """Deletes a bundle that no job uses."""
        return await self._caller.call("DELETE", path("v1", "bundles", which), BundleView, repeatable=False)
