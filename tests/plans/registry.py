"""Cost limits of the statements about datasets; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_ORG = {"org_id": "seed.id('org 0')"}
_DATASET = {"dataset_uuid": "seed.id('dataset 0')"}
_VERSION = {"dataset_version": "seed.id('version 0')"}
_DATASETS = {"dataset_uuids": "array[seed.id('dataset 0')]"}
_JOB = {"job_id": "seed.id('dag job 0')"}
_JOBS = {"job_ids": "array[seed.id('dag job 0'), seed.id('dag job 1')]"}
_RANGE = {"start": "20005", "end": "20995"}
_COUNT = 1000
"""Partitions counted for the view of one version."""

REGISTRY: dict[str, list[Expectation]] = {
    "dataset_by_uuid": [Bounded(1, _ORG | _DATASET)],
    "dataset_by_name": [Bounded(1, _ORG | {"name": "'name 7'"})],
    "dataset_by_output": [Bounded(1, _ORG | {"dag": "'dag 0'", "job": "'job'", "output": "'output'"})],
    "dataset": [Bounded(1, _ORG | _DATASET, rows=10)],
    "list_datasets": [
        Bounded(
            210, _ORG | {"role": "'reader'", "limit": "100", "after": "'00000000-0000-0000-0000-000000000000'"}, rows=6
        )
    ],
    "versions_of": [
        Bounded(
            21,
            _DATASET | {"current_version": "seed.id('version 0')", "limit": "20", "bound": str(_COUNT)},
            rows=60,
            pages=20,
        )
    ],
    "version_of": [Bounded(1, _DATASET | _VERSION)],
    "partition_of": [Bounded(1, _VERSION)],
    "partitions_of": [
        Bounded(100, _VERSION | {"after": "20000", "from_": "20005", "to": "90000", "limit": "100"}),
    ],
    "events_of": [Bounded(100, _DATASET | {"before": "9223372036854775807", "limit": "100"})],
    "readers_of_datasets": [Bounded(100, _ORG | _DATASETS | {"limit": "1001"}, rows=4)],
    "written_by": [Bounded(2, _ORG | {"job_ids": "array[seed.id('dag job 0')]", "limit": "1001"})],
    "writers_of_datasets": [Bounded(1, _ORG | _DATASETS | {"limit": "1001"}, rows=5)],
    "read_by": [Bounded(2, _ORG | _JOBS | {"limit": "1001"})],
    "names_of_datasets": [Bounded(1, _ORG | _DATASETS)],
}

INVALIDATIONS: dict[str, list[Expectation]] = {
    "producer_of": [Bounded(1, _ORG | _VERSION, rows=5)],
    "version_for_change": [Bounded(1, _VERSION)],
    "next_commit": [Bounded()],
    "holding_back": [Bounded(2, _JOBS)],
    "active_readers": [Bounded(100, _VERSION)],
    "scopes_within": [Bounded(200, _JOBS | _RANGE | {"limit": "10001"}, rows=4)],
    "partitions_within": [Bounded(100, _VERSION | _RANGE | {"limit": "10001"})],
    "renew_partitions": [
        Bounded(
            100,
            _VERSION | {"commit_id": "7", "starts": "array(select generate_series(20000, 20990, 10))::bigint[]"},
            pages=30,
        )
    ],
    "set_commit": [Bounded(1, _VERSION | {"commit_id": "7"}, pages=30)],
    "insert_invalidation": [
        Bounded(
            1,
            _ORG
            | _DATASET
            | _VERSION
            | _RANGE
            | {"reason": "'why'", "asked_by": "'who'", "scopes": "1", "commit_id": "7"},
        )
    ],
}

SCOPES: dict[str, list[Expectation]] = {
    "inputs_in_range": [Bounded(1, _JOB | _RANGE, rows=10, pages=30)],
    "job_of_dag": [Bounded(1, _ORG | {"dag": "'dag 0'", "name": "'dag job 0'"})],
    "scope_given": [Bounded(100, _JOB | _RANGE | {"inputs": "1", "limit": "100"}, rows=4)],
    "streams_read": [Bounded(1, _JOB)],
    "task_given": [Bounded(1, {"shard": "0", "task_id": "seed.task('queued', 7)"})],
}

RETENTION: dict[str, list[Expectation]] = {
    "dag_jobs_after": [Bounded(100, {"after": "'00000000-0000-0000-0000-000000000000'", "limit": "100"})],
    "delete_ended_tasks": [
        Bounded(
            300,
            {
                "job_ids": "array[seed.id('job 3')]",
                "made_before": "'ffffffff-ffff-ffff-ffff-ffffffffffff'",
                "age_seconds": "0",
                "limit": "100",
            },
            rows=6,
        )
    ],
    "delete_old_events": [Bounded(100, {"since": "0", "age_seconds": "0", "limit": "100"}, rows=4)],
    "delete_expired_capabilities": [Bounded(5000, {"limit": "5000"})],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, table in {
        "invalidations": INVALIDATIONS,
        "registry": REGISTRY,
        "retention": RETENTION,
        "scopes": SCOPES,
    }.items()
    for name, cases in table.items()
}
