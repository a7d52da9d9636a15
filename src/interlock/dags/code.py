"""Jobs of a DAG that run code of users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from interlock.dags.definition import Dag
from interlock.kernel.udf import UDF, Bundle, pinned


def udf_configs(dag: Dag) -> list[dict[str, Any]]:
    return [job.config for job in dag.jobs if job.operator == UDF]


def pinned_to(dag: Dag, bundles: Mapping[str, Bundle]) -> Dag:
    """With digests for names: the same file is another version of the DAG once a name has moved."""
    jobs = (replace(job, config=pinned(job.config, bundles)) if job.operator == UDF else job for job in dag.jobs)
    return replace(dag, jobs=tuple(jobs))
