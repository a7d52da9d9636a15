"""Builds the capability for untrusted code: bundles, and their invocation by a runner."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.build import Access
from interlock.http.requests import Connection
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database
from interlock.tasks.build import TaskKernel
from interlock.untrusted.bundles import Bundles, BundleSweep
from interlock.untrusted.invocations import Invoker
from interlock.untrusted.runners import open_runner


@dataclass(frozen=True)
class Untrusted:
    bundles: Bundles
    invoker: Invoker


def build_untrusted(
    settings: Settings, database: Database, wakeups: Wakeups, access: Access, tasks: TaskKernel
) -> Untrusted:
    runner = open_runner(settings)
    return Untrusted(
        bundles=Bundles(database, settings, access.objects),
        invoker=Invoker(database, settings, tasks.claims, tasks.attempts, access.objects, runner, wakeups),
    )


def bundle_loops(settings: Settings, database: Database, objects: Objects) -> list[Service]:
    return [BundleSweep(database, settings, objects)]


def untrusted_of(connection: Connection) -> Untrusted:
    untrusted: Untrusted = connection.app.state.untrusted
    return untrusted
