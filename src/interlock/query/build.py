"""Builds the records of queries. The query service itself is built in its own process: see apps/query.py."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.http.requests import Connection
from interlock.processes.loop import Service
from interlock.query.catalogue import Catalogue
from interlock.query.records import Queries, QueryRetention
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Database
from interlock.tasks.result_packs import Packs


@dataclass(frozen=True)
class QueryHistory:
    records: Queries
    catalogue: Catalogue


def build_query_history(settings: Settings, database: Database, objects: Objects, packs: Packs) -> QueryHistory:
    return QueryHistory(Queries(database, settings, objects, packs), Catalogue(database))


def query_loops(settings: Settings, database: Database) -> list[Service]:
    return [QueryRetention(database, settings)]


def query_history_of(connection: Connection) -> QueryHistory:
    query: QueryHistory = connection.app.state.query
    return query
