"""A valid body for every operation that takes one, with stand-ins for ids."""

from __future__ import annotations

from typing import Any

from tests.fuzz.listeners import ORG, PRODUCER, TARGET
from tests.fuzz.seeded_state import (
    BATCH,
    COMMAND,
    DATASET,
    DELIVERY,
    HELD_RUN,
    JOB,
    LEASE,
    MESSAGE,
    QUEUED,
    RECEIPT,
    RETIRED_VERSION,
    RUN,
    RUNNING,
    UNREACHABLE,
    VERSION,
    dag_text,
)

Body = dict[str, Any]

FENCE: Body = {"task_id": RUNNING, "attempt": 1, "lease_token": LEASE}
_DATASET: Body = {"dataset_uuid": DATASET, "dataset_version": VERSION}
_OUTPUT: Body = {
    **_DATASET,
    "output_index": 0,
    "location": "s3://x/y",
    "start": 1,
    "end": 2,
    "partition_key": "1-2",
    "row_count": 3,
    "bytes": 4,
    "schema_hash": "abc",
}
_FAILED: Body = {
    **FENCE,
    "status": "Failed",
    "error_class": "Oops",
    "error_message": "it broke",
    "crash": {"exit_code": 1, "signal": "SIGKILL", "oom": True},
}
_COMPLETED: Body = {
    **FENCE,
    "status": "Completed",
    "result": {"n": 1},
    "outputs": [_OUTPUT],
    "events": [{**_DATASET, "cursor": 5}, {**_DATASET, "start": 1, "end": 9}],
}
_HEARTBEAT: Body = {**FENCE, "progress": 0.5, "progress_text": "half", "token": True}
_GROUP: Body = {"run_id": HELD_RUN, "attempt": 1, "lease_token": LEASE}
_MESSAGE: Body = {"message_id": MESSAGE, "receipt": RECEIPT}
_RANGE: Body = {"run_id": RUN, "start": 0, "end": 1}
_SETTLE: Body = {"queue": "platform", "items": [_MESSAGE], "visibility_seconds": 5, "delay_seconds": 1}
_JOB: Body = {
    "name": None,
    "operator": "echo",
    "runtime": "platform",
    "tasks": [{"n": 1, "deep": {"er": [1]}}, [1, 2]],
    "config": {"a": {"b": 1}},
    "policy": {
        "max_attempts": 2,
        "backoff_seconds": 1,
        "backoff_factor": 2,
        "backoff_cap_seconds": 3,
        "jitter": 0.5,
        "non_retryable": ["Oops"],
        "lease_seconds": 60,
        "timeout_seconds": 60,
    },
    "scaling": {"max_concurrency": 2, "key": "/n", "max_concurrency_per_key": 1},
    "priority": "bulk",
    "outputs": [_DATASET],
    "dedupe_by": None,
    "update": True,
}

_COMMAND: Body = {
    "metadata": {
        "id": "5c0a0a5e-5f5e-4c0e-8a55-1d2f3a4b5c6d",
        "timestamp": "2026-01-01T00:00:00Z",
        "type": "snavio.command-sent",
        "version_id": "hmac-v1",
        "hmac": "0" * 64,
    },
    "command": {"target": "mailer", "name": "send-mail", "payload": {"n": 1}},
}

GATEWAY: dict[str, list[Body]] = {
    "/v1/jobs": [_JOB, {"name": JOB, "tasks": [["a", "b"]], "dedupe_by": "/1"}, {"operator": "echo", "open": True}],
    "/v1/uploads": [{"parts": 2}, {}],
    "/v1/jobs/{job}/tasks": [{"tasks": [{"n": 1}, [2]]}],
    "/v1/jobs/{job}/rerun": [
        {"run": None, "status": ["Failed"], "error_class": "Oops", "first": 0, "last": 5},
        {"run": RUN, "status": [], "error_class": None, "first": 1, "last": None},
    ],
    "/v1/jobs/{job}/exports": [{"format": "zip", "run": None}, {"format": "jsonl", "run": RUN}],
    "/v1/tasks/cancel": [{"job": JOB, "run": None, "status": "Queued", "dry_run": True}],
    "/v1/tasks/redrive": [{"job": None, "run": RUN, "error_class": "Oops", "dry_run": True, "limit": 5}],
    "/v1/bulk-operations": [{"kind": "cancel", "filter": {"job": JOB, "status": "Queued"}, "dry_run": True}],
    "/v1/dags/{dag}/pause": [{"reason": "odd"}, {"reason": None}],
    "/v1/keys": [{"user": "odd", "role": "reader", "scopes": ["jobs:read"], "expires_in_days": 1, "org": ORG}],
    "/v1/secrets/{secret}": [{"value": "a-long-enough-value", "hosts": ["rpc.example.com:8545", "[2001:db8::1]"]}],
    "/v1/members": [{"subject": "odd|user", "role": "writer", "org": ORG}],
    "/v1/worker-tokens": [{"name": "odd", "runtimes": ["platform"], "expires_in_days": 1}],
    "/v1/orgs/{org}/operators": [{"operators": ["echo", "acme.*"]}, {"operators": None}],
    "/v1/orgs": [{"name": "another"}],
    "/v1/dags": [{"yaml": dag_text("odd")}],
    "/v1/dags/{dag}/rollback": [{"to": None}, {"to": RETIRED_VERSION}],
    "/v1/dags/{dag}/purge": [{"version": RETIRED_VERSION[:8]}],
    "/v1/dags/{dag}/jobs/{job}/backfills": [
        {"start": 0, "end": 9, "priority": "normal", "reason": "odd", "dry_run": True},
        {"start": -9, "end": 2**62, "priority": "bulk", "reason": "odder", "dry_run": False},
    ],
    "/v1/dags/{dag}/jobs/{job}/events": [
        {"events": [{"output": "out", "start": 0, "end": 9}, {"output": None, "start": 10, "end": 19}]},
        {"events": [{"payload": {"n": 1}}]},
        {"events": [{"cursor": 5}]},
    ],
    "/v1/dags/{dag}/jobs/{job}/secret": [{"rotate": True}],
    "/v1/hooks/{hook_id}": [{"n": 1}],
    "/v1/commands": [_COMMAND, {"commands": [_COMMAND, _COMMAND]}],
    "/v1/webhooks": [
        {
            "name": "odd",
            "url": UNREACHABLE,
            "events": ["run.failed"],
            "dag": None,
            "job": JOB,
            "failed_share": 0.5,
            "done_share": 1,
            "paused": True,
        }
    ],
    "/v1/replays": [
        {
            "origin": "dead-letters",
            "reason": "odd",
            "filters": {"queue": "q", "source": "a", "since": "2026-01-31T12:00:00Z", "command_ids": [QUEUED]},
            "dry_run": True,
            "rate": 1,
            "limit": 1,
        }
    ],
    "/v1/alert-channels/{event}": [{"channels": [{"kind": "dashboard"}, {"kind": "email", "to": "a@b.example"}]}],
    "/v1/inbox/{queue}/receive": [{"max": 1, "wait_seconds": 0, "visibility_seconds": 1}],
    "/v1/inbox/{queue}/extend": [{"items": [_MESSAGE], "visibility_seconds": 5}],
    "/v1/inbox/{queue}/ack": [{"items": [_MESSAGE]}],
    "/v1/inbox/{queue}/nack": [{"items": [_MESSAGE], "delay_seconds": 1}],
    "/v1/inbox/{queue}/redrive": [{"message_ids": ["1"], "limit": 1}, {"message_ids": None}],
    "/v1/inbox/{queue}/discard": [{"message_ids": ["1"], "limit": 1}, {"message_ids": None}],
    "/v1/webhooks/{webhook}/rotate": [{"overlap_seconds": 60}],
    "/v1/webhooks/{webhook}/redrive": [{"delivery_ids": [DELIVERY], "limit": 1}, {"delivery_ids": None}],
    "/v1/services": [{"name": "odd", "description": "x", "dispatch_mode": "cold-only"}],
    "/v1/routes": [
        {
            "target": TARGET,
            "name": "odd",
            "queue": "odds",
            "dlq": "odds-dlq",
            "dag": None,
            "job": None,
            "dedupe_mode": "strict",
            "dedupe_seconds": 60,
            "expected_drain_seconds": 60,
            "fairness": {"dominant_share": 0.5, "competing_share": 0.2, "minimum_volume": 2, "ban_seconds": 3},
            "expires_at": "2090-01-01T00:00:00Z",
        },
        {"target": TARGET, "name": "odder", "job": JOB},
    ],
    "/v1/routes/test": [{"source": PRODUCER, "target": TARGET, "name": COMMAND}],
    "/v1/acls": [
        {
            "source": PRODUCER,
            "target": TARGET,
            "name": "odd",
            "sensitivity": "critical",
            "expires_at": "2090-01-01T00:00:00Z",
        }
    ],
    "/v1/limits": [
        {
            "target": TARGET,
            "name": "odd",
            "source": PRODUCER,
            "rate": 5,
            "window_seconds": 2,
            "burst": 1,
            "cooldown_seconds": 1,
            "enforcement": "relaxed",
        },
        {"source": PRODUCER, "rate": 1_000_000},
    ],
    "/v1/service-keys": [{"service": TARGET, "overlap_seconds": 60}],
    "/v1/datasets/{dataset}/invalidate": [
        {"start": 0, "end": 9, "reason": "odd", "dry_run": True},
        {"start": -9, "end": 2**62, "reason": "odder", "dry_run": False},
    ],
}
PUT = frozenset({"/v1/alert-channels/{event}", "/v1/secrets/{secret}"})
"""Operations that use PUT instead of POST."""
DISPATCHER: dict[str, list[Body]] = {
    "/internal/operators": [{"queue": "platform", "worker_id": "odd", "operators": ["module:function"]}],
    "/internal/task-claim": [
        {"worker_id": "odd", "task_id": QUEUED, "message": {**_MESSAGE, "queue": "platform"}},
        {"worker_id": "odd", "task_ids": [QUEUED, QUEUED], "limit": 1},
        {**_RANGE, "worker_id": "odd", "limit": 1, "tokens": False, "grouped": True},
        {"worker_id": "odd", "ranges": [{**_RANGE, "message": {**_MESSAGE, "queue": "udf"}}]},
    ],
    "/internal/task-heartbeat": [{"items": [_HEARTBEAT]}],
    "/internal/task-complete": [
        {"items": [_FAILED]},
        {"items": [_COMPLETED], "groups": [{**_GROUP, "indexes": [0, 1], "results": [None, {"n": 1}]}]},
    ],
    "/internal/task-release": [{"items": [FENCE]}],
    "/internal/task-logs": [{"items": [{**FENCE, "start": 0, "text": "0000000000000oodd\nno time"}]}],
    "/internal/task-data": [{"items": [FENCE]}],
    "/internal/queue/receive": [
        {"queue": "udf", "worker_id": "odd", "max": 1, "wait_seconds": 0, "visibility_seconds": 5}
    ],
    "/internal/queue/extend": [_SETTLE],
    "/internal/queue/ack": [_SETTLE],
    "/internal/queue/nack": [_SETTLE],
    "/v1/task/heartbeat": [_HEARTBEAT],
    "/v1/task/complete": [_FAILED, _COMPLETED],
    "/v1/task/events": [{**FENCE, "events": [{**_DATASET, "start": 1, "end": 9, "partition_key": "1-9"}]}],
    "/v1/task/buffer-publish": [{**FENCE, **_DATASET, "batch_uri": BATCH, "record_count": 1}],
    "/v1/task/credentials": [FENCE],
}
_SELECT: Body = {"sql": "select 1 as one", "format": "json", "mode": "interactive", "export": False, "limit": 5}
QUERY: dict[str, list[Body]] = {
    "/v1/query": [_SELECT, {"sql": "select count(*) from blocks", "datasets": ["chain:feed:blocks"], "mode": "batch"}],
    "/v1/task/query": [{**FENCE, **_SELECT}, {**FENCE, "sql": "select 1", "export": True}],
}
