"""The served OpenAPI documents, modified so that ids may also be stand-ins for existing objects."""

from __future__ import annotations

from typing import Any

from tests.fuzz.listeners import ORG, PRODUCER, TARGET
from tests.fuzz.request_bodies import DISPATCHER, GATEWAY
from tests.fuzz.request_bodies import QUERY as QUERIES
from tests.fuzz.seeded_state import (
    ALERT,
    BACKFILL,
    BATCH,
    BUILDING_DAG,
    BUNDLE,
    BY_HAND,
    CAPPED_JOB,
    CHANGE,
    COMMAND,
    CURSOR,
    DAG,
    DAG_JOB,
    DATASET,
    DELIVERY,
    DONE_JOB,
    DONE_RUN,
    EXPORT,
    FOREIGN_JOB_ID,
    FOREIGN_RUN,
    FREE_SERVICE,
    HELD_RUN,
    HOOK,
    HOOK_TOKEN,
    HOOKED,
    INBOX,
    JOB,
    JOB_ID,
    KEY,
    LEASE,
    LIMITED,
    MEMBER,
    MESSAGE,
    NEW_KEY,
    OBJECTS,
    OPEN_JOB,
    PUBLISHED,
    QUERY,
    QUEUES,
    RECEIPT,
    REPLAY,
    RETIRED_DAG,
    RETIRED_VERSION,
    RUN,
    RUNNING,
    SECRET,
    SOURCES_DAG,
    TASKS,
    TOKEN,
    TOLD_WEBHOOK,
    UNREACHABLE,
    VERSION,
    WEBHOOK,
    dag_text,
)

Schema = dict[str, Any]

PARAMETERS: dict[str, list[Any]] = {
    "task_id": TASKS,
    "run_id": [DONE_RUN, RUN, FOREIGN_RUN],
    "index": [0],
    "run": [None, RUN, FOREIGN_RUN],
    "job": [DONE_JOB, JOB, CAPPED_JOB, JOB_ID, FOREIGN_JOB_ID, DAG_JOB, OPEN_JOB],
    "dag": [DAG, BUILDING_DAG, RETIRED_DAG],
    "dataset": [DATASET, "doubled", f"{DAG}:feed:blocks"],
    "version": [None, VERSION],
    "start": [0],
    "end": [9],
    "queue": QUEUES,
    "key_id": [KEY],
    "token_id": [TOKEN],
    "subject": [MEMBER],
    "org": [ORG],
    "publish_id": [PUBLISHED],
    "query_id": [QUERY],
    "export_id": [EXPORT],
    "cursor": [CURSOR, JOB_ID],
    "Idempotency-Key": [NEW_KEY],
    "prefix": [OBJECTS],
    "bundle": [BUNDLE],
    "secret": [SECRET],
    "webhook": [WEBHOOK],
    "delivery_id": [DELIVERY],
    "service": [FREE_SERVICE],
    "target": [TARGET],
    "name": [COMMAND],
    "source": [TARGET],
    "version_id": ["hmac-v1"],
    "change_id": [CHANGE],
    "alert_id": [ALERT],
    "replay_id": [REPLAY],
    "event": ["snavio.command.invalid"],
    "q": [JOB, DAG],
}

_FENCE: dict[str, list[Any]] = {"task_id": [RUNNING], "attempt": [1], "lease_token": [LEASE]}
_SQL: list[Any] = ["select 1", "select * from blocks", "select * from read_csv('/etc/passwd')", "select 1; select 2"]
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
    "CredentialsRequest": _FENCE,
    "TaskQuery": _FENCE | {"sql": _SQL},
    "UserQuery": {"sql": _SQL, "datasets": [None, ["chain:feed:blocks"]]},
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
    "KeyRequest": {"org": [None, ORG], "service": [None, TARGET], "scopes": [["jobs:read"], ["jobs:read", "admin"]]},
    "MemberRequest": {"org": [None, ORG]},
    "RouteRequest": {
        "target": [TARGET],
        "queue": ["fuzzed"],
        "dlq": ["fuzzed-dlq"],
        "dag": [None],
        "job": [None],
        "expires_at": [None],
    },
    "AclRequest": {"source": [PRODUCER], "target": [TARGET], "expires_at": [None]},
    "LimitRequest": {"target": [TARGET], "source": [None, PRODUCER]},
    "ServiceKeyRequest": {"service": [TARGET]},
    "RouteTrialRequest": {"source": [PRODUCER], "target": [TARGET], "name": [COMMAND]},
    "ReplayFilters": {"since": [None], "until": [None]},
    "WebhookRequest": {"url": [UNREACHABLE]},
    "DeliveryRedrive": {"delivery_ids": [None, [DELIVERY]]},
    "WorkerTokenRequest": {"runtimes": [["platform"], ["platform", "udf"]]},
}


_INBOX = ("receive", "extend", "ack", "nack", "dead-letters", "redrive", "discard")
_HOOKED: dict[str, list[Any]] = {"dag": [SOURCES_DAG], "job": [HOOKED]}
BY_PATH: dict[str, dict[str, list[Any]]] = {
    "/v1/dags/{dag}/sources": {"dag": [SOURCES_DAG]},
    "/v1/dags/{dag}/jobs/{job}/events": {"dag": [SOURCES_DAG], "job": [BY_HAND, HOOKED]},
    "/v1/dags/{dag}/jobs/{job}/secret": _HOOKED,
    "/v1/backfills/{run_id}": {"run_id": [BACKFILL]},
    "/v1/backfills/{run_id}/pause": {"run_id": [BACKFILL]},
    "/v1/backfills/{run_id}/resume": {"run_id": [BACKFILL]},
    "/v1/backfills/{run_id}/cancel": {"run_id": [BACKFILL]},
    "/v1/webhooks/{webhook}/deliveries/{delivery_id}": {"webhook": [TOLD_WEBHOOK]},
    "/v1/webhooks/{webhook}/deliveries": {"webhook": [TOLD_WEBHOOK]},
    "/v1/webhooks/{webhook}/redrive": {"webhook": [TOLD_WEBHOOK]},
    "/v1/service-keys/{service}/{version_id}": {"service": [TARGET]},
    "/v1/limits": {"source": [LIMITED]},
    **{f"/v1/inbox/{{queue}}/{what}": {"queue": [INBOX]} for what in _INBOX},
    "/v1/hooks/{hook_id}": {"hook_id": [HOOK], "X-Interlock-Token": [HOOK_TOKEN]},
}
"""Parameters that are only useful together."""


OBJECT = "/v1/objects/{key}"
"""A key contains slashes, which OpenAPI does not allow in a path parameter. Existing keys are tested in
tests/access/test_gateway_objects.py."""


APART = (
    OBJECT,
    "/v1/session",
    "/v1/sign-in",
    "/v1/bulk-operations",
    "/v1/commands/{command_id}",
    "/v1/dags/{dag}/jobs/{job}/explain",
    "/v1/dags/{dag}/jobs/{job}/backfills",
    "/v1/dags/{dag}/jobs/{job}/events",
    "/v1/datasets/{dataset}/invalidate",
)
"""Beginnings of paths that need a browser's session, an object that only one moment has, or a range whose form depends
on the job. Tests: tests/access/test_sessions.py, tests/jobs/test_bulk_operations.py, tests/bus/test_fates.py,
tests/datasets/test_datasets_explained.py."""


def _without_those_apart(document: Schema) -> None:
    for path in [path for path in document["paths"] if path.startswith(APART)]:
        del document["paths"][path]
    if "/v1/jobs" in document["paths"]:
        # The gateway relays it to a query service, which is tested by itself.
        document["paths"].pop("/v1/query", None)
    # Its deletion would take the DAGs of all other operations.
    document["paths"].pop("/v1/dags/{dag}", None)


def bent(document: Schema) -> Schema:
    _without_those_apart(document)
    for path, item in document["paths"].items():
        for operation in item.values():
            for parameter in operation.get("parameters", []):
                known = PARAMETERS | BY_PATH.get(path, {})
                parameter["schema"] = _or(known.get(parameter["name"], []), parameter["schema"])
            # The driver inserts a zip, which JSON cannot express.
            if "requestBody" in operation and path != "/v1/bundles":
                examples = {str(n): {"value": body} for n, body in enumerate((GATEWAY | DISPATCHER | QUERIES)[path])}
                content = operation["requestBody"]["content"]
                content["application/json"]["examples"] = examples
                if "text/plain" in content:
                    content["text/plain"]["examples"] = {"0": {"value": dag_text("plain")}}
    if "QueryFormat" in document["components"]["schemas"]:
        # The other formats are streams, which the document describes only by their media type.
        document["components"]["schemas"]["QueryFormat"] = {"const": "json"}
    for name, properties in PROPERTIES.items():
        known = document["components"]["schemas"].get(name, {}).get("properties", {})
        for field, values in properties.items():
            if field in known:
                known[field] = _or(values, known[field])
    return document


def _or(values: list[Any], schema: Schema) -> Schema:
    return {"anyOf": [*({"const": value} for value in values), schema]} if values else schema
