"""The bus process: everything that no command waits for. It needs the state database and the objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlock.access.build import open_keyring
from interlock.access.secrets import Seal, require_seal
from interlock.apps.metrics import serving_metrics
from interlock.apps.process import run_loops, stop_on_signals
from interlock.apps.stores import listening, process_objects, state_database
from interlock.bus import loops
from interlock.bus.build import build_ingress
from interlock.bus.registry.loader import RegistryReads
from interlock.bus.registry.snapshot import SnapshotPublisher
from interlock.clock import Clock
from interlock.processes.loop import Service
from interlock.settings import Settings


@asynccontextmanager
async def bus(settings: Settings, *, clock: Clock | None = None) -> AsyncIterator[list[Service]]:
    objects, seal = process_objects(settings), Seal(settings.signing_keys_dir)
    async with state_database(settings, "bus", clock) as database, serving_metrics(settings, database, "bus_metrics"):
        await require_seal(database, seal)
        keyring = open_keyring(settings, database)
        try:
            async with listening(settings, commands=True) as wakeups:
                ingress = build_ingress(settings, database, wakeups)
                registry = RegistryReads(database, seal)
                yield [
                    *loops.services(settings, database, objects, wakeups, ingress, registry),
                    SnapshotPublisher(database, settings, objects, keyring),
                ]
        finally:
            await keyring.signers.close()


async def run_bus(settings: Settings) -> None:
    stop = stop_on_signals()
    async with bus(settings) as services:
        await run_loops(services, stop)
