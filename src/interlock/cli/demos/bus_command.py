"""The demo's command: one service sends a signed command to another, which recomputes a range."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from interlock.cli.output import console, table
from interlock.client import Client
from interlock.client.bus import Consumer, DeliveredMessage, Delivery, Producer, TelemetryConsumer
from interlock.wire.access import KeyRequest, Role
from interlock.wire.base import RunState
from interlock.wire.bus_events import CommandDelivered
from interlock.wire.bus_registry import AclRequest, RouteRequest, ServiceRequest
from interlock.wire.dags import BackfillRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from interlock.wire.commands import CommandVerdict
    from interlock.wire.dags import BackfillView

_ASKS: Final = "auditor"
_DOES: Final = "pipeline"
_COMMAND: Final = "recompute"
_QUEUE: Final = "recomputations"
_WAIT_SECONDS: Final = 10.0


class Wanted(msgspec.Struct):
    """The payload of the command."""

    dag: str
    job: str
    start: int
    end: int


@dataclass(frozen=True)
class Office:
    """Two services, each with its own key, that communicate only over the bus."""

    client: Client
    """An admin client: it registers the services, and the receiving service uses it to start the backfill."""
    url: str

    async def ask(self, wanted: Wanted) -> bool:
        """Returns True if the range was recomputed and the sender received a delivery confirmation."""
        await self._register()
        asks, does = await self._key(_ASKS), await self._key(_DOES)
        started: asyncio.Future[UUID] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        async with Consumer(self.url, does, _QUEUE) as consumer, Producer(self.url, asks) as producer:
            consuming = asyncio.create_task(consumer.run(self._doing(started), stop=stop))
            try:
                verdict = await producer.send(_DOES, _COMMAND, msgspec.to_builtins(wanted))
                run_id = await asyncio.wait_for(started, _WAIT_SECONDS)
            finally:
                stop.set()
                await consuming
        made = await self.client.backfills.wait(run_id)
        return await self._show(verdict, made, asks)

    async def _register(self) -> None:
        registry = self.client.registry
        for service in (_ASKS, _DOES):
            await registry.put_service(ServiceRequest(name=service))
        await registry.put_route(
            RouteRequest(target=_DOES, name=_COMMAND, queue=_QUEUE, dlq=f"{_QUEUE}-dead"),
        )
        await registry.put_acl(AclRequest(source=_ASKS, target=_DOES, name=_COMMAND))

    async def _key(self, service: str) -> str:
        made = await self.client.create_key(KeyRequest(user=service, role=Role.READER, service=service))
        return made.key

    def _doing(self, started: asyncio.Future[UUID]) -> Callable[[Delivery[DeliveredMessage]], Awaitable[None]]:
        async def recompute(delivery: Delivery[DeliveredMessage]) -> None:
            command = delivery.body.command
            wanted = msgspec.convert(command.payload, Wanted)
            request = BackfillRequest(start=wanted.start, end=wanted.end, reason=f"requested by {command.source}")
            answer = await self.client.backfills.start(wanted.dag, wanted.job, request)
            if answer.backfill is not None and not started.done():
                started.set_result(answer.backfill.run_id)

        return recompute

    async def _show(self, verdict: CommandVerdict, made: BackfillView, key: str) -> bool:
        delivered = await self._delivery_event(verdict.command_id, key)
        rows = [
            ("command", verdict.outcome),
            ("telemetry", "nothing" if delivered is None else f"delivered, by the {delivered.path} stage"),
            ("backfill", made.run_state.value),
        ]
        console().print(table(("", ""), rows, empty=""))
        return delivered is not None and made.run_state is RunState.COMPLETED

    async def _delivery_event(self, command_id: str | None, key: str) -> CommandDelivered | None:
        """Returns the telemetry event for the command."""
        async with TelemetryConsumer(self.url, key) as telemetry:
            until = asyncio.get_running_loop().time() + _WAIT_SECONDS
            while asyncio.get_running_loop().time() < until:
                for delivery in await telemetry.receive(wait_seconds=2):
                    await delivery.ack()
                    for event in delivery.body.events:
                        if isinstance(event, CommandDelivered) and str(event.command_id) == str(command_id):
                            return event
        return None
