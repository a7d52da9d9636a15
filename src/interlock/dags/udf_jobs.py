"""Jobs of a DAG that run user code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from interlock.dags.definition import Dag
from interlock.untrusted.udf import UDF, Bundle, pinned


def udf_configs(dag: Dag) -> list[dict[str, Any]]:
    return [job.config for job in dag.jobs if job.operator == UDF]


def pinned_to(dag: Dag, bundles: Mapping[str, Bundle]) -> Dag:
    """Replaces bundle names with digests, so that a name that points to a new bundle gives a new DAG version."""
    jobs = (replace(job, config=pinned(job.config, bundles)) if job.operator == UDF else job for job in dag.jobs)
    return replace(dag, jobs=tuple(jobs))
