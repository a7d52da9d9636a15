"""Puts the parts together. The only place that chooses adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from interlock.access.development import SharedSecret
from interlock.access.jwks import PublishedKeys
from interlock.access.keyring import Keyring
from interlock.access.lockout import Lockout
from interlock.access.members import Members
from interlock.access.object_tokens import ObjectTokens
from interlock.access.oidc import Issuer
from interlock.access.principals import Principals
from interlock.access.request_limit import RequestLimit
from interlock.access.signed_urls import RESULTS, SignedUrls
from interlock.access.tokens import CapabilityTokens, CapabilityVerifier
from interlock.adapters.documents import Documents
from interlock.adapters.notifications import Listener, Wakeups
from interlock.adapters.objects import Objects, open_objects
from interlock.adapters.pgqueue import PgQueue
from interlock.adapters.postgres import Database, require_schema
from interlock.adapters.queue import Queue
from interlock.adapters.runner import open_runner
from interlock.adapters.signers import Signers
from interlock.adapters.sts import Sts
from interlock.adapters.valkey import Coordination
from interlock.buffers.reads import Buffers
from interlock.bulk.backfills import Backfills
from interlock.bulk.exports import Exports, ExportStaging
from interlock.bulk.receipts import Receipts
from interlock.bulk.reruns import RerunCopies, Reruns
from interlock.bulk.results import Results
from interlock.bulk.submission import BulkSubmissions
from interlock.bulk.uploads import Uploads
from interlock.bus.alerts import Alerts
from interlock.bus.caches import Caches
from interlock.bus.fast import Fast
from interlock.bus.inbox import Inbox
from interlock.bus.ingress import Ingress
from interlock.bus.keys import ServiceKeys
from interlock.bus.limits import Limits
from interlock.bus.monitor import RouteHealths
from interlock.bus.registry import Registry as BusRegistry
from interlock.bus.registry_pages import RegistryPages
from interlock.bus.registry_reads import RegistryReads
from interlock.bus.replays import Replays
from interlock.bus.secrets import Seal, require_seal
from interlock.bus.shield import Shield
from interlock.bus.snapshot_loading import Snapshots
from interlock.bus.snapshot_publishing import SnapshotPublishing
from interlock.clock import Clock, SystemClock
from interlock.dags import ranges
from interlock.dags.cutover import CutOver
from interlock.dags.dataset_lineage import DatasetLineage
from interlock.dags.deploying import Deployments
from interlock.dags.hooks import Hooks
from interlock.dags.invalidation import Invalidations
from interlock.dags.manual import ManualEvents
from interlock.dags.operators import RANGES
from interlock.dags.pressure import Pauses, Pressure
from interlock.dags.reasons import ScopeExplanations
from interlock.dags.registry import Registry
from interlock.dags.retirement import Retirement
from interlock.dags.routing import Router, ScopeReconciler
from interlock.dags.scheduler import Scheduler
from interlock.dags.sources import AlwaysOn, Sources
from interlock.dags.triggers import Triggers
from interlock.dags.versions import DagReads
from interlock.errors import ConfigurationError
from interlock.kernel.actions import Actions
from interlock.kernel.bundles import Bundles, BundleSweep
from interlock.kernel.claims import Claims, Gates
from interlock.kernel.credentials import Credentials
from interlock.kernel.deletion import RunDeletions
from interlock.kernel.effects import Effects
from interlock.kernel.explain import Explanations
from interlock.kernel.files import Files
from interlock.kernel.inline import OPERATORS, InlineRunner
from interlock.kernel.inputs import Inputs
from interlock.kernel.invoke import Invoker, by_kind
from interlock.kernel.loop import Service
from interlock.kernel.markers import Markers
from interlock.kernel.operators import Operators
from interlock.kernel.pace import HotStatus, Pace
from interlock.kernel.packs import Packs
from interlock.kernel.presence import Presence
from interlock.kernel.queries import Queries, QueryRetention
from interlock.kernel.rates import Rates
from interlock.kernel.reads import Reads
from interlock.kernel.reaper import Reaper
from interlock.kernel.reconcile import Reconciler
from interlock.kernel.relay import Invoke, Relay
from interlock.kernel.retention import Retention
from interlock.kernel.retries import Retries
from interlock.kernel.run_control import Deadlines, RunControl, RunWakes
from interlock.kernel.runs import RunCancels, RunCounters
from interlock.kernel.secrets import Secrets
from interlock.kernel.shards import Shards
from interlock.kernel.submission import Submissions
from interlock.kernel.sweeper import Sweeper
from interlock.kernel.tasks import Tasks
from interlock.kernel.turns import TurnKeeping, Turns
from interlock.kernel.webhook_delivery import WebhookDeliveries, WebhookSweep
from interlock.kernel.webhooks import Webhooks
from interlock.outbound.addresses import Exceptions
from interlock.outbound.guard import Guard
from interlock.settings import Settings
from interlock.wire.bus_registry import DispatchMode

log = structlog.get_logger()


@dataclass(frozen=True)
class Kernel:
    """Everything a gateway or a dispatcher works with."""

    settings: Settings
    clock: Clock
    database: Database
    wakeups: Wakeups
    listener: Listener
    queue: Queue
    shards: Shards
    turns: Turns
    coordination: Coordination | None
    request_limit: RequestLimit
    keyring: Keyring
    tokens: CapabilityTokens
    capabilities: CapabilityVerifier
    """What lets attempts in: the tokens themselves, or a verifier that has nothing but public keys."""
    principals: Principals
    lockout: Lockout
    members: Members
    secrets: Secrets
    claims: Claims
    tasks: Tasks
    effects: Effects
    files: Files
    objects: Objects
    signed_urls: SignedUrls
    object_tokens: ObjectTokens
    credentials: Credentials
    submissions: Submissions
    uploads: Uploads
    bulk: BulkSubmissions
    queries: Queries
    reads: Reads
    actions: Actions
    run_control: RunControl
    pace: Pace
    status: HotStatus
    explanations: Explanations
    inline: InlineRunner
    invoker: Invoker
    bundles: Bundles
    pauses: Pauses
    backfills: Backfills
    operators: Operators
    presence: Presence
    sources: Sources
    manual_events: ManualEvents
    hooks: Hooks
    deployments: Deployments
    dags: DagReads
    registry: Registry
    dataset_lineage: DatasetLineage
    invalidations: Invalidations
    scope_explanations: ScopeExplanations
    buffers: Buffers
    outbound: Guard
    webhooks: Webhooks
    ingress: Ingress
    results: Results
    receipts: Receipts
    exports: Exports
    reruns: Reruns
    inbox: Inbox
    alerts: Alerts
    route_health: RouteHealths
    bus_registry: BusRegistry
    bus_pages: RegistryPages
    service_keys: ServiceKeys
    replays: Replays

    @property
    def _invoke(self) -> Invoke:
        return by_kind(self.settings, self.inline.invoke, self.invoker.invoke)

    def services(self) -> list[Service]:
        """The background loops of a dispatcher; any number of dispatchers may run them at once."""
        database, settings = self.database, self.settings
        return [
            Relay(database, settings, self.queue, self._invoke, self.wakeups),
            Retries(database, settings, self.shards),
            Reaper(database, settings, self.shards, self.turns),
            RunCounters(database, settings, self.pace),
            RunCancels(database, settings, self.actions),
            Reconciler(database, settings, self.shards, self.turns),
            Retention(database, settings, self.keyring),
            RunDeletions(database, settings, self.shards),
            RunWakes(database, settings),
            TurnKeeping(database, settings, self.turns),
            Deadlines(database, settings),
            Router(database, settings, self.wakeups),
            Triggers(database, settings, self.wakeups),
            AlwaysOn(database, settings),
            ScopeReconciler(database, settings, self.wakeups),
            CutOver(database, settings),
            Retirement(database, settings, self.actions),
            Pressure(database, settings, self.wakeups),
            Sweeper(database, settings, self.objects),
            QueryRetention(database, settings),
            BundleSweep(database, settings, self.objects),
            WebhookDeliveries(database, settings, self.wakeups, self.outbound),
            WebhookSweep(database, settings),
            ExportStaging(database, settings, self.objects),
            RerunCopies(database, settings, self.objects),
        ]


def assemble(
    settings: Settings,
    database: Database,
    *,
    coordination: Coordination | None,
    state_url: str,
    commands: bool = True,
) -> Kernel:
    clock = database.clock
    wakeups = Wakeups()
    queue = PgQueue(database, wakeups, max_receives=settings.queue_max_receives, bulk_share=settings.bulk_share)
    keyring = _keyring(settings, database)
    tokens = CapabilityTokens(
        database,
        keyring,
        clock,
        issuer=settings.token_issuer,
        ttl_seconds=settings.token_ttl_seconds,
        secret=_development_secret(settings),
    )
    inputs = Inputs(settings.objects_root, RANGES)
    shards = Shards(database)
    turns = Turns(database, settings, coordination, queue, shards)
    secrets = Secrets(database, Seal(settings.signing_keys_dir))
    signed_urls = SignedUrls(keyring, clock, base_url=settings.objects_base_url)
    objects = open_objects(
        settings.objects_root,
        endpoint=settings.objects_endpoint,
        region=settings.objects_region,
        sign_url=signed_urls.sign,
    )
    packs = Packs(database, objects, inline_bytes=settings.result_inline_bytes)
    tasks = Tasks(database, settings, tokens, Markers(objects), inputs, packs, turns)
    operators = Operators(database, settings)
    gates = Gates(turns, Rates(coordination, clock), operators, tasks)
    claims = Claims(database, settings, queue, tokens, inputs, shards, gates, secrets)
    files = Files(database, settings, tasks, inputs)
    object_tokens = ObjectTokens(database, keyring, clock, issuer=settings.token_issuer, root=settings.objects_root)
    effects = Effects(database, settings)
    reads = Reads(database, packs, settings.retention_days)
    registry = Registry(database)
    actions = Actions(database, settings, reads)
    pace = Pace(coordination, clock)
    status = HotStatus(reads, pace, coordination)
    service_keys = ServiceKeys(database, settings, Seal(settings.signing_keys_dir))
    submissions = Submissions(database, settings, operators)
    uploads = Uploads(database, settings, objects)
    outbound = Guard(Exceptions.read(settings.outbound_allow), ports=settings.outbound_ports)
    return Kernel(
        settings=settings,
        clock=clock,
        database=database,
        wakeups=wakeups,
        listener=Listener(state_url, wakeups, commands=commands),
        queue=queue,
        shards=shards,
        turns=turns,
        coordination=coordination,
        request_limit=RequestLimit(coordination),
        keyring=keyring,
        tokens=tokens,
        capabilities=tokens,
        principals=Principals(database, clock),
        lockout=Lockout(settings.auth_failures_per_second),
        members=Members(database, identity_provider(settings, clock)),
        secrets=secrets,
        claims=claims,
        tasks=tasks,
        effects=effects,
        files=files,
        objects=objects,
        signed_urls=signed_urls,
        object_tokens=object_tokens,
        credentials=Credentials(database, settings, tasks, files, object_tokens, _sts(settings)),
        submissions=submissions,
        uploads=uploads,
        bulk=BulkSubmissions(database, settings, submissions, uploads, reads),
        queries=Queries(database, settings, objects, packs),
        reads=reads,
        actions=actions,
        run_control=RunControl(database, settings, reads, actions, status),
        pace=pace,
        status=status,
        explanations=Explanations(database, coordination),
        invoker=Invoker(database, settings, claims, tasks, objects, open_runner(settings), wakeups),
        bundles=Bundles(database, settings, objects),
        inline=InlineRunner(database, claims, tasks, effects, OPERATORS | ranges.OPERATORS),
        pauses=Pauses(database),
        backfills=Backfills(database, settings, actions),
        operators=operators,
        presence=Presence(database),
        sources=Sources(database),
        manual_events=ManualEvents(database, settings),
        hooks=Hooks(database, settings, clock),
        deployments=Deployments(database, settings, operators),
        dags=DagReads(database),
        registry=registry,
        dataset_lineage=DatasetLineage(database, registry),
        invalidations=Invalidations(database, settings, registry),
        scope_explanations=ScopeExplanations(database),
        buffers=Buffers(database, settings),
        outbound=outbound,
        webhooks=Webhooks(database, settings, outbound),
        inbox=Inbox(database, queue),
        alerts=Alerts(database, settings),
        route_health=RouteHealths(database),
        ingress=_ingress(settings, database, wakeups, _start(settings, database, objects, keyring)),
        replays=Replays(database),
        bus_registry=BusRegistry(database, service_keys),
        bus_pages=RegistryPages(database),
        service_keys=service_keys,
        results=Results(
            database, reads, packs, SignedUrls(keyring, clock, base_url=settings.objects_base_url, path=RESULTS)
        ),
        exports=Exports(database, settings, objects, reads),
        reruns=Reruns(database, settings, submissions, uploads, reads),
        receipts=Receipts(database, keyring, reads, issuer=settings.token_issuer),
    )


def _keyring(settings: Settings, database: Database) -> Keyring:
    signers = Signers(
        settings.signing_keys_dir, kind=settings.signing, kms_key=settings.kms_key_id, endpoint=settings.kms_endpoint
    )
    return Keyring(database, signers, verify_seconds=2 * settings.token_ttl_seconds)


def _development_secret(settings: Settings) -> SharedSecret | None:
    if not settings.development_tokens:
        return None
    log.warning("development_tokens", meaning="capability tokens are HS256: whoever verifies them can make them")
    return SharedSecret(settings.signing_keys_dir)


def _start(settings: Settings, database: Database, objects: Objects, keyring: Keyring) -> Snapshots | None:
    if not settings.bus_snapshots:
        return None
    return Snapshots(objects, keyring, Seal(settings.signing_keys_dir), database.clock, settings)


def _ingress(settings: Settings, database: Database, wakeups: Wakeups, start: Snapshots | None = None) -> Ingress:
    registry = RegistryReads(database, Seal(settings.signing_keys_dir))
    return Ingress(
        database,
        Caches(registry, database.clock, start=start),
        Shield(window_seconds=settings.command_window_seconds),
        Fast(mode=DispatchMode(settings.dispatch_mode)),
        Limits(database, prefetchers=settings.token_prefetchers),
        wakeups,
        report_seconds=settings.audit_seconds,
    )


def with_published_keys(parts: Kernel) -> Kernel:
    """Attempts are let in by the keys that the dispatcher publishes; by those in Postgres, where none is named."""
    settings = parts.settings
    if settings.internal_url is None:
        return parts
    keys = PublishedKeys(settings.internal_url, Documents(settings.tls_ca), parts.clock)
    verifier = CapabilityVerifier(
        parts.database, keys, parts.clock, issuer=settings.token_issuer, secret=_development_secret(settings)
    )
    return replace(parts, capabilities=verifier)


def identity_provider(settings: Settings, clock: Clock) -> Issuer | None:
    if settings.oidc_issuer is None or settings.oidc_audience is None:
        return None
    return Issuer(settings.oidc_issuer, settings.oidc_audience, Documents(), clock, jwks_url=settings.oidc_jwks_url)


@asynccontextmanager
async def kernel(
    settings: Settings,
    *,
    process: str,
    clock: Clock | None = None,
    signs: bool = True,
    commands: bool = True,
    seals: bool = True,
) -> AsyncIterator[Kernel]:
    """Opens the stores named in the settings, checks the schema, and closes everything at the end.

    A process that does not sign makes no key, either: it would have it to itself. One without `commands` is not woken
    for those; one without `seals` opens no sealed secret.
    """
    url = _state_url(settings)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_state_database(settings, process, clock))
        coordination = None
        if settings.valkey_url is not None:
            coordination = Coordination(settings.valkey_url.get_secret_value())
            stack.push_async_callback(coordination.close)
        parts = assemble(settings, database, coordination=coordination, state_url=url, commands=commands)
        stack.push_async_callback(parts.keyring.signers.close)
        stack.push_async_callback(parts.credentials.close)
        stack.push_async_callback(parts.ingress.close)
        if seals:
            await require_seal(database, Seal(settings.signing_keys_dir))
        if signs:
            await parts.keyring.ensure()
        else:
            parts = with_published_keys(parts)
        stack.push_async_callback(parts.invoker.close)
        listening = asyncio.create_task(parts.listener.run(), name="listener")
        stack.push_async_callback(_stop, listening)
        yield parts


@asynccontextmanager
async def scheduler(settings: Settings, *, clock: Clock | None = None) -> AsyncIterator[Service]:
    """The loop of a scheduler, which needs the state database and nothing else."""
    async with _state_database(settings, "scheduler", clock) as database:
        yield Scheduler(database, settings)


@asynccontextmanager
async def sink(
    settings: Settings, *, clock: Clock | None = None, wait_seconds: float = 10.0
) -> AsyncIterator[list[Service]]:
    """The loops of a sink, which needs both databases and the objects."""
    # Arrow, which nobody else here pays for.
    from interlock.buffers import sinking  # noqa: PLC0415

    if settings.data_url is None:
        raise ConfigurationError(
            "data_url is not set. `interlock up` starts an embedded database and sets it for its processes; "
            "a sink of its own needs INTERLOCK_DATA_URL."
        )
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_state_database(settings, "sink", clock))
        wakeups = Wakeups()
        queue = PgQueue(database, wakeups, max_receives=settings.queue_max_receives, bulk_share=settings.bulk_share)
        objects = open_objects(
            settings.objects_root, endpoint=settings.objects_endpoint, region=settings.objects_region
        )
        listening = asyncio.create_task(Listener(_state_url(settings), wakeups).run(), name="listener")
        stack.push_async_callback(_stop, listening)
        url = settings.data_url.get_secret_value()
        yield await stack.enter_async_context(
            sinking.services(settings, database, queue, objects, url, wait_seconds=wait_seconds)
        )


@asynccontextmanager
async def bus(settings: Settings, *, clock: Clock | None = None) -> AsyncIterator[list[Service]]:
    """The loops behind the command bus, which needs the state database and the objects."""
    # Arrow, as with the sink.
    from interlock.bus import process  # noqa: PLC0415

    objects = open_objects(settings.objects_root, endpoint=settings.objects_endpoint, region=settings.objects_region)
    async with _state_database(settings, "bus", clock) as database:
        await require_seal(database, Seal(settings.signing_keys_dir))
        wakeups, keyring = Wakeups(), _keyring(settings, database)
        listener = Listener(_state_url(settings), wakeups, commands=True)
        listening = asyncio.create_task(listener.run(), name="listener")
        try:
            registry = RegistryReads(database, Seal(settings.signing_keys_dir))
            yield [
                *process.services(
                    settings, database, objects, wakeups, _ingress(settings, database, wakeups), registry
                ),
                SnapshotPublishing(database, settings, objects, keyring),
            ]
        finally:
            await _stop(listening)
            await keyring.signers.close()


@asynccontextmanager
async def ingest(
    settings: Settings, *, clock: Clock | None = None, wait_seconds: float = 10.0
) -> AsyncIterator[list[Service]]:
    """The loops of an ingest process, which needs the state database and the objects."""
    # Arrow, which nobody else here pays for.
    from interlock.bulk import ingesting  # noqa: PLC0415

    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(_state_database(settings, "ingest", clock))
        wakeups = Wakeups()
        queue = PgQueue(database, wakeups, max_receives=settings.queue_max_receives, bulk_share=settings.bulk_share)
        objects = open_objects(
            settings.objects_root, endpoint=settings.objects_endpoint, region=settings.objects_region
        )
        url = _state_url(settings)
        listening = asyncio.create_task(Listener(url, wakeups).run(), name="listener")
        stack.push_async_callback(_stop, listening)
        yield ingesting.services(settings, database, queue, objects, url, wait_seconds=wait_seconds)


@asynccontextmanager
async def _state_database(settings: Settings, process: str, clock: Clock | None) -> AsyncIterator[Database]:
    url = _state_url(settings)
    await require_schema(url)
    database = await Database.open(
        url,
        size=settings.database_connections,
        timeout=settings.database_timeout_seconds,
        clock=clock or SystemClock(),
        name=f"interlock-{process}",
    )
    try:
        yield database
    finally:
        await database.close()


def _sts(settings: Settings) -> Sts | None:
    if settings.credentials_role_arn is None:
        return None
    return Sts(settings.credentials_role_arn, endpoint=settings.sts_endpoint, region=settings.objects_region)


def _state_url(settings: Settings) -> str:
    if settings.state_url is None:
        raise ConfigurationError(
            "state_url is not set. `interlock up` starts an embedded database and sets it for its processes; "
            "a process of its own needs INTERLOCK_STATE_URL."
        )
    return settings.state_url.get_secret_value()


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
