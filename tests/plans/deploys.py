"""Cost limits of the statements about deployed DAGs; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_DAG = {"dag_id": "seed.id('deployed 0')"}
_ZERO = "'00000000-0000-0000-0000-000000000000'"
_BUILDING = {"dag_version": "seed.id('deploy 1')"}
_SWAPPED = _ORG | {"job_id": "seed.id('built 10')"}
_DEPLOY = Exempt("part of a deploy, which is rare: writes the rows of the DAG's jobs")

_WRITES = (
    "lock_deploys insert_dag insert_version make_ids insert_datasets insert_jobs insert_versions insert_edges"
    " insert_version_jobs set_state retire_jobs activate_jobs tune_jobs point_datasets turn_edges publish unpublish"
    " touch_readers"
    " wake_loops publications_in_use existing_inputs existing_published mark_build touch_jobs"
)

DAGS: dict[str, list[Expectation]] = {
    **{name: [_DEPLOY] for name in _WRITES.split()},
    "lock_dag": [Bounded(1, _ORG | {"name": "'deployed 7'"})],
    "dag_by_name": [Bounded(1, _ORG | {"name": "'deployed 7'"})],
    "list_dags": [Bounded(100, _ORG | {"after": "'deployed 0'", "limit": "100"})],
    "live_versions": [Bounded(3, _DAG | {"content_hash": "encode(sha256('7'), 'hex')"})],
    "version_by_prefix": [Bounded(1, _DAG | {"prefix": "left(encode(sha256('7'), 'hex'), 12)"})],
    "previous_version": [Bounded(1, _DAG)],
    "list_versions": [Bounded(100, _DAG | {"cursor": "null", "limit": "100"})],
    "jobs_of_version": [Bounded(10, _BUILDING)],
    "dag_jobs": [Bounded(10, _BUILDING)],
    "publications_of": [Bounded(1, _DAG)],
    "published_by_others": [Bounded(1, _ORG | {"names": "'{name 7}'", "dag_name": "'deployed 0'"})],
    "some_published": [Bounded(1000, _ORG | {"dag_name": "'deployed 0'", "limit": "1000"})],
    "building_versions": [Bounded(1, {"after": _ZERO, "limit": "100"})],
    "build_progress": [Bounded(10, _BUILDING | {"limit": "1"}, rows=24, pages=80)],
    "swapped_jobs": [Bounded(20, {"after": _ZERO, "limit": "100", "grace": "60"}, rows=8)],
    "settled": [Bounded(1, {"job_id": "seed.id('built 10')", "active": "false", "grace": "60"})],
    "unended_tasks": [Bounded(2000, _SWAPPED | {"limit": "2000", "asked": asked}) for asked in ("true", "false")],
    "live_runs": [Bounded(1, _SWAPPED | {"limit": "100"})],
    "take_back_scopes": [Bounded(20, {"job_id": "seed.id('built 10')", "limit": "1000"}, rows=8, pages=40)],
    "drop_rows": [Bounded(5000, _SWAPPED | {"limit": "5000", "root": "'file:///objects'"})],
    "hand_over_tasks": [
        Bounded(
            100,
            {
                "job_id": "seed.id('manual 0')",
                "task_ids": "array(select seed.id('left ' || n) from generate_series(1, 100) n)",
            },
            pages=40,
        )
    ],
}

_CONTROL = Exempt("pauses, resumes or deletes a whole DAG, which is rare: writes the rows of its jobs")
_CONTROLS = "pause_dag hold_jobs resume_dag release_jobs delete_dag restore_dag hide_jobs purge_versions"

CONTROL: dict[str, list[Expectation]] = {
    **{name: [_CONTROL] for name in _CONTROLS.split()},
    "waking_jobs": [Bounded(1, {"limit": "20"})],
    "queued_after": [Bounded(2000, _SWAPPED | {"after": _ZERO, "limit": "2000"})],
    "job_woken_to": [Bounded(1, {"job_id": "seed.id('built 10')", "walked_from": _ZERO, "walked_to": "null"})],
}

EXPECTED = {f"dags.{name}": cases for name, cases in DAGS.items()} | {
    "failures.failures": [
        Live(
            "select count(*) from interlock.jobs where dag_name is not null and active",
            "looks at the newest failed tasks of each active job of the org's DAGs",
            _ORG | {"dag": "null", "most": "100", "limit": "100"},
            rows=400,
            pages=400,
        )
    ]
}
EXPECTED |= {f"control.{name}": cases for name, cases in CONTROL.items()}
