"""Builds the datasets capability: registry, lineage, files of attempts, buffered datasets."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.access.build import Access
from interlock.datasets.buffers.records import Buffers
from interlock.datasets.credentials import Credentials
from interlock.datasets.files import Files, Sweeper
from interlock.datasets.registry import DatasetLineage, Registry
from interlock.http.requests import Connection
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.objects.s3 import Sts
from interlock.stores.postgres import Database
from interlock.tasks.build import TaskKernel
from interlock.tasks.dataset_changes import Inputs


@dataclass(frozen=True)
class Datasets:
    registry: Registry
    lineage: DatasetLineage
    files: Files
    credentials: Credentials
    buffers: Buffers


def build_datasets(
    settings: Settings, database: Database, access: Access, tasks: TaskKernel, inputs: Inputs
) -> Datasets:
    registry = Registry(database)
    files = Files(database, settings, tasks.attempts, inputs)
    return Datasets(
        registry=registry,
        lineage=DatasetLineage(database, registry),
        files=files,
        credentials=Credentials(database, settings, tasks.attempts, files, access.object_tokens, _sts(settings)),
        buffers=Buffers(database, settings),
    )


def _sts(settings: Settings) -> Sts | None:
    if settings.credentials_role_arn is None:
        return None
    return Sts(settings.credentials_role_arn, endpoint=settings.sts_endpoint, region=settings.objects_region)


def dataset_loops(settings: Settings, database: Database, objects: Objects) -> list[Service]:
    return [Sweeper(database, settings, objects)]


def datasets_of(connection: Connection) -> Datasets:
    datasets: Datasets = connection.app.state.datasets
    return datasets
