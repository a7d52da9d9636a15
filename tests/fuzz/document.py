"""The served OpenAPI documents, bent towards what is there: wherever an id belongs, a stand-in may stand as well."""

from __future__ import annotations

from typing import Any

from tests.fuzz.bodies import DISPATCHER, GATEWAY
from tests.fuzz.site import ORG
from tests.fuzz.state import (
    BACKFILL,
    BATCH,
    BUILDING_DAG,
    BY_HAND,
    CAPPED_JOB,
    CURSOR,
    DAG,
    DAG_JOB,
    DATASET,
    FOREIGN_JOB_ID,
    FOREIGN_RUN,
    HELD_RUN,
    HOOK,
    HOOK_TOKEN,
    HOOKED,
    JOB,
    JOB_ID,
    KEY,
    LEASE,
    MESSAGE,
    NEW_KEY,
    QUEUES,
    RECEIPT,
    RETIRED_DAG,
    RETIRED_VERSION,
    RUN,
    RUNNING,
    SOURCES_DAG,
    TASKS,
    TOKEN,
    VERSION,
    dag_text,
)

Schema = dict[str, Any]

PARAMETERS: dict[str, list[Any]] = {
    "task_id": TASKS,
    "run_id": [RUN, FOREIGN_RUN],
    "run": [RUN, FOREIGN_RUN],
    "job": [JOB, CAPPED_JOB, JOB_ID, FOREIGN_JOB_ID, DAG_JOB],
    "dag": [DAG, BUILDING_DAG, RETIRED_DAG],
    "dataset": [DATASET, "doubled", f"{DAG}:feed:blocks"],
    "version": [None, VERSION],
    "start": [0],
    "end": [9],
    "queue": QUEUES,
    "key_id": [KEY],
    "token_id": [TOKEN],
    "cursor": [CURSOR, JOB_ID],
    "Idempotency-Key": [NEW_KEY],
}

_FENCE: dict[str, list[Any]] = {"task_id": [RUNNING], "attempt": [1], "lease_token": [LEASE]}
_DATASET: dict[str, list[Any]] = {"dataset_uuid": [DATASET], "dataset_version": [VERSION]}
_RANGE: dict[str, list[Any]] = {"run_id": [RUN], "start": [0], "end": [4]}
_MESSAGE: dict[str, list[Any]] = {"message_id": [MESSAGE], "receipt": [RECEIPT], "queue": QUEUES}
_FILTER: dict[str, list[Any]] = {"job": [JOB, CAPPED_JOB, JOB_ID], "run": [None, RUN, FOREIGN_RUN]}

PROPERTIES: dict[str, dict[str, list[Any]]] = {
    "Heartbeat": _FENCE,
    "Release": _FENCE,
    "Completion": _FENCE,
    "CompletionGroup": {"run_id": [HELD_RUN], "attempt": [1], "lease_token": [LEASE], "indexes": [[0], [0, 1]]},
    "EventBatch": _FENCE,
    "BufferPublish": _FENCE | _DATASET | {"batch_uri": [BATCH]},
    "Event": _DATASET,
    "Output": _DATASET,
    "DatasetRef": _DATASET,
    "ClaimRequest": _RANGE | {"task_id": TASKS},
    "ClaimRange": _RANGE,
    "Receipt": _MESSAGE,
    "MessageRef": _MESSAGE,
    "ReceiveRequest": {"queue": QUEUES},
    "SettleRequest": {"queue": QUEUES},
    "JobRequest": {
        "name": [None],
        "operator": ["echo"],
        "runtime": [*QUEUES, "spark", "dispatcher"],
        "tasks": [[{"n": 1}], [{"n": 1}, {"n": 2}]],
        "dedupe_by": [None, "/n"],
    },
    "Scaling": {"key": [None, "/n"], "max_concurrency_per_key": [None]},
    "DagRequest": {"yaml": [dag_text("posted"), dag_text("posted", 1), dag_text(RETIRED_DAG, 3)]},
    "RollbackRequest": {"to": [None]},
    "PurgeRequest": {"version": [RETIRED_VERSION, RETIRED_VERSION[:8]]},
    "CancelRequest": _FILTER,
    "RedriveRequest": _FILTER,
    "KeyRequest": {"org": [None, ORG], "scopes": [["jobs:read"], ["jobs:read", "admin"]]},
    "WorkerTokenRequest": {"runtimes": [["platform"], ["platform", "udf"]]},
}


_HOOKED: dict[str, list[Any]] = {"dag": [SOURCES_DAG], "job": [HOOKED]}
BY_PATH: dict[str, dict[str, list[Any]]] = {
    "/v1/dags/{dag}/sources": {"dag": [SOURCES_DAG]},
    "/v1/dags/{dag}/jobs/{job}/events": {"dag": [SOURCES_DAG], "job": [BY_HAND, HOOKED]},
    "/v1/dags/{dag}/jobs/{job}/secret": _HOOKED,
    "/v1/backfills/{run_id}": {"run_id": [BACKFILL]},
    "/v1/backfills/{run_id}/pause": {"run_id": [BACKFILL]},
    "/v1/backfills/{run_id}/resume": {"run_id": [BACKFILL]},
    "/v1/backfills/{run_id}/cancel": {"run_id": [BACKFILL]},
    "/v1/hooks/{hook_id}": {"hook_id": [HOOK], "X-Interlock-Token": [HOOK_TOKEN]},
}
"""Parameters that make sense only together."""


def bent(document: Schema) -> Schema:
    for path, item in document["paths"].items():
        for operation in item.values():
            for parameter in operation.get("parameters", []):
                known = PARAMETERS | BY_PATH.get(path, {})
                parameter["schema"] = _or(known.get(parameter["name"], []), parameter["schema"])
            if "requestBody" in operation:
                examples = {str(n): {"value": body} for n, body in enumerate((GATEWAY | DISPATCHER)[path])}
                content = operation["requestBody"]["content"]
                content["application/json"]["examples"] = examples
                if "text/plain" in content:
                    content["text/plain"]["examples"] = {"0": {"value": dag_text("plain")}}
    for name, properties in PROPERTIES.items():
        known = document["components"]["schemas"].get(name, {}).get("properties", {})
        for field, values in properties.items():
            if field in known:
                known[field] = _or(values, known[field])
    return document


def _or(values: list[Any], schema: Schema) -> Schema:
    return {"anyOf": [*({"const": value} for value in values), schema]} if values else schema
