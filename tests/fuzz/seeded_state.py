"""Work in every state, behind fixed names.

A generated request may contain one of the stand-ins below in place of an id. Just before it is sent, each stand-in is
replaced with an unused existing object of that kind. So generation is deterministic, and requests still reach states
that a random UUID would never reach.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg

from interlock.dags.definition import content_hash
from interlock.tasks.shards import run_task_id
from tests.fuzz.listeners import ORG, PRODUCER, TARGET, FuzzedListeners
from tests.support.code_bundles import zipped
from tests.support.dags import valid
from tests.support.system import fence

Names = dict[str, str]

CAPABILITY = "X-Trace-Task-Capability"


def _id(number: int) -> str:
    return str(UUID(int=0x5EED0000_0000_4000_8000_000000000000 + number))


QUEUED, RUNNING, RETRYING, DEAD, COMPLETED, CANCELED, FOREIGN = (_id(n) for n in range(1, 8))
TASKS = [QUEUED, RUNNING, RETRYING, DEAD, COMPLETED, CANCELED, FOREIGN]
LEASE, RUN, HELD_RUN, FOREIGN_RUN, JOB_ID, FOREIGN_JOB_ID = (_id(n) for n in range(11, 17))
MESSAGE, RECEIPT = "5551", _id(31)
BATCH = "s3://stand-in/batch"
KEY, TOKEN = "5eed000000000001", "5eed000000000002"
CURSOR = "5eedC"
NEW_KEY = "an-idempotency-key"
BUILDING_DAG = "building-dag"
HOOK, HOOK_TOKEN = "a-hook", "a-token-of-a-hook"
MEMBER = "a-member"
BACKFILL = _id(41)
PUBLISHED = _id(42)
QUERY = _id(43)
EXPORT = _id(45)
DONE_RUN = _id(46)
OBJECTS = "objects-of-an-attempt/"
BUNDLE = "a-bundle"
SECRET = "A_SECRET"
WEBHOOK, DELIVERY = "a-webhook", _id(44)
FREE_SERVICE, COMMAND, CHANGE = "a-free-service", "a-command-of-a-target", "a-change"
LIMITED = "a-service-with-a-limit"
ALERT, REPLAY, OPEN_JOB = _id(47), _id(48), _id(49)

# These exist as they are, because the test chooses them.
JOB, CAPPED_JOB, DONE_JOB = "fuzzed-job", "capped-job", "done-job"
DATASET, VERSION = _id(21), _id(22)
DAG, DAG_JOB = "chain", "double"
RETIRED_DAG = "retired-dag"
SOURCES_DAG, BY_HAND, HOOKED = "sources-dag", "by-hand", "hooked"
QUEUES = ["platform", "udf"]
INBOX = "fuzz-inbox"
TOLD_WEBHOOK, UNREACHABLE = "told-webhook", "https://hooks.invalid/"

_MANY, _FEW, _REAL = 100, 5, 3
_OUTPUTS = [{"dataset_uuid": DATASET, "dataset_version": VERSION}]


def dag_text(name: str, number: int = 0) -> str:
    """Returns a DAG; each number is another version of it."""
    return f"""
name: {name}
jobs:
  - {{name: feed, operator: echo, activation: source, source: {{kind: manual}}, outputs: [blocks]}}
  - {{name: derive, operator: echo, inputs: [{{from: {{job: feed, output: blocks}}}}], config: {{n: {number}}}}}
"""


_SOURCES = f"""
name: {SOURCES_DAG}
jobs:
  - {{name: {BY_HAND}, operator: echo, runtime: udf, activation: source, source: {{kind: manual}}, outputs: [out]}}
  - {{name: {HOOKED}, operator: echo, runtime: udf, activation: source, source: {{kind: webhook}}}}
  - {{name: called, operator: echo, runtime: udf, activation: source, source: {{kind: webhook, auth: token}}}}
  - {{name: always, operator: echo, runtime: udf, activation: source, source: {{kind: always_on}}}}
"""

_BACKFILLED = """
name: backfilled
jobs:
  - {name: feed, operator: echo, activation: source, source: {kind: manual}, outputs: [blocks]}
  - {name: derive, operator: echo, runtime: udf, inputs: [{from: {job: feed, output: blocks}}], max_queue_depth: 1}
"""

RETIRED_VERSION = content_hash(valid(dag_text(RETIRED_DAG)))


class State:
    """Returns existing objects for stand-ins, and creates more when they are used up."""

    def __init__(self, site: FuzzedListeners) -> None:
        self._site = site
        self._pools: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._make: dict[str, Callable[[], list[Any]]] = {
            QUEUED: lambda: self._ids(self._submitted(_MANY), _MANY),
            RUNNING: lambda: self._claimed(_MANY),
            HELD_RUN: lambda: [self._claimed_together() for _ in range(_FEW)],
            RETRYING: lambda: self._ended(_FEW, "Failed"),
            DEAD: lambda: self._ended(_FEW, "Failed", max_attempts=1),
            COMPLETED: lambda: self._ended(_FEW, "Completed"),
            CANCELED: lambda: self._ended(_FEW, "Canceled"),
            FOREIGN: lambda: self._ids(self._submitted(_MANY, key=site.rival_key, outputs=[]), _MANY),
            RUN: lambda: [self._submitted(_FEW)["run_id"] for _ in range(_FEW)],
            FOREIGN_RUN: lambda: [self._submitted(1, key=site.rival_key, outputs=[])["run_id"]],
            JOB_ID: lambda: [self._submitted(1)["job_id"] for _ in range(_FEW)],
            FOREIGN_JOB_ID: lambda: [self._submitted(1, key=site.rival_key, outputs=[])["job_id"]],
            MESSAGE: self._received,
            NEW_KEY: lambda: [str(uuid4())],
            KEY: lambda: [self._key()["view"]["key_id"] for _ in range(_FEW)],
            TOKEN: lambda: [self._token()["view"]["token_id"] for _ in range(_FEW)],
            MEMBER: lambda: [self._member() for _ in range(_FEW)],
            BUILDING_DAG: lambda: [self._building() for _ in range(_FEW)],
            BACKFILL: lambda: [self._backfill() for _ in range(_FEW)],
            PUBLISHED: lambda: self._refused(_FEW),
            QUERY: lambda: self._asked(_FEW),
            EXPORT: lambda: self._exports(_FEW),
            DONE_RUN: lambda: [self._completed()["run_id"] for _ in range(_FEW)],
            OPEN_JOB: lambda: [self._open_job() for _ in range(_FEW)],
            BUNDLE: lambda: [self._bundle() for _ in range(_FEW)],
            SECRET: lambda: [self._secret() for _ in range(_FEW)],
            WEBHOOK: lambda: self._webhooks([f"w{uuid4().hex}" for _ in range(_FEW)]),
            DELIVERY: lambda: self._dead_deliveries(_FEW),
            FREE_SERVICE: lambda: [self._service() for _ in range(_FEW)],
            LIMITED: lambda: [self._limited() for _ in range(_FEW)],
            COMMAND: lambda: [self._command() for _ in range(_FEW)],
            CHANGE: lambda: [self._change() for _ in range(_FEW)],
            ALERT: lambda: [self._alert() for _ in range(_FEW)],
            REPLAY: lambda: [self._replay() for _ in range(_FEW)],
            HOOK: lambda: [self._hook["hook_id"]] * _MANY,
            OBJECTS: lambda: [self._object_prefix] * _MANY,
            HOOK_TOKEN: lambda: [self._hook["secret"]] * _MANY,
            CURSOR: lambda: [site.user("GET", "/v1/tasks?limit=1")["next_cursor"]] * _MANY,
        }
        self._deployed(RETIRED_DAG, 2)
        self._hook = self._sources()
        self._site.user("POST", "/v1/dags", json={"yaml": _BACKFILLED})
        told = {"events": [{"start": n, "end": n + 9} for n in range(0, 50, 10)]}
        self._site.user("POST", "/v1/dags/backfilled/jobs/feed/events", json=told)
        self._webhooks([TOLD_WEBHOOK])
        inbox = {"target": PRODUCER, "name": "told", "queue": INBOX, "dlq": f"{INBOX}-dlq"}
        self._site.user("POST", "/v1/routes", json=inbox)
        self._submitted(_FEW, name=JOB)
        self._done = self._completed()
        self._submitted(_MANY, name=CAPPED_JOB, scaling={"max_concurrency": 3})
        self.held = self.take(RUNNING)
        """An attempt that stays unchanged: its token is sent with requests that name another task or none."""
        self.object_token, self._object_prefix = self._objects_of(self.held)

    @property
    def admin_key(self) -> str:
        return self._site.admin_key

    def take(self, stand_in: str) -> Any:
        pool = self._pools[stand_in]
        if not pool:
            pool.extend(self._make[stand_in]())
        return pool.popleft()

    def spared(self, value: Any) -> Any:
        """Protects the credentials of the test itself, which appear in lists; revoking them would end the test."""
        own = {self._site.admin_key.split("_")[1]: KEY, self._site.worker_token.split("_")[1]: TOKEN}
        own |= {PRODUCER: FREE_SERVICE}
        return own.get(value, value) if isinstance(value, str) else value

    def exchange(self, value: Any, names: Names | None = None) -> Any:
        """Returns the value with an existing object for every stand-in; those in one object belong together."""
        if isinstance(value, dict):
            here = names if names is not None else self._together(value)
            return {self.exchange(k, here): self.exchange(v, here) for k, v in value.items()}
        if isinstance(value, list):
            # Very long lists would need thousands of objects; a few existing ones among unknown ones are enough.
            return [self.exchange(item, names) for item in value[:_REAL]] + value[_REAL:]
        if not isinstance(value, str):
            return value
        return (names or {}).get(value) or self._one(value)

    def _one(self, text: str) -> str:
        if text not in self._make:
            return text
        taken = self.take(text)
        names = {RUNNING: "task_id", MESSAGE: "message_id", HELD_RUN: "run_id"}
        return taken if isinstance(taken, str) else str(taken[names[text]])

    def _together(self, value: dict[str, Any]) -> Names | None:
        if value.get("task_id") == RUNNING:
            return names_of(self.take(RUNNING))
        if value.get("run_id") == HELD_RUN:
            group = self.take(HELD_RUN)
            return {HELD_RUN: group["run_id"], LEASE: group["lease_token"]}
        if value.get("message_id") == MESSAGE:
            message = self.take(MESSAGE)
            return {MESSAGE: message["message_id"], RECEIPT: message["receipt"]}
        return None

    def _submitted(self, tasks: int, *, key: str | None = None, policy: Any = None, **job: Any) -> Any:
        body = {
            "operator": "echo",
            "tasks": [{"n": n} for n in range(tasks)],
            "policy": {"lease_seconds": 3600, "backoff_seconds": 3600} | (policy or {}),
            "outputs": _OUTPUTS,
        }
        return self._site.user("POST", "/v1/jobs", key=key, json=body | job)

    def _open_job(self) -> str:
        return str(self._site.user("POST", "/v1/jobs", json={"operator": "echo", "open": True})["job_id"])

    def _ids(self, accepted: Any, tasks: int) -> list[str]:
        return [str(run_task_id(UUID(accepted["run_id"]), n)) for n in range(tasks)]

    def _claimed(self, tasks: int, **policy: Any) -> list[Any]:
        run_id = self._submitted(tasks, policy=policy)["run_id"]
        wanted = {"worker_id": "fuzz", "run_id": run_id, "start": 0, "end": tasks - 1}
        claims: list[Any] = self._site.worker("/internal/task-claim", wanted)["claims"]
        return claims

    def _claimed_together(self) -> Any:
        run_id = self._submitted(2, outputs=[])["run_id"]
        wanted = {"worker_id": "fuzz", "run_id": run_id, "start": 0, "end": 1, "grouped": True, "tokens": False}
        return self._site.worker("/internal/task-claim", wanted)["groups"][0]

    def _ended(self, tasks: int, status: str, **policy: Any) -> list[str]:
        claims = self._claimed(tasks, **policy)
        self._site.worker("/internal/task-complete", {"items": [fence(c) | {"status": status} for c in claims]})
        return [claim["task_id"] for claim in claims]

    def _completed(self) -> Any:
        """Creates an ended run with results."""
        accepted = self._submitted(_FEW, name=DONE_JOB, outputs=[])
        wanted = {"worker_id": "fuzz", "run_id": accepted["run_id"], "start": 0, "end": _FEW - 1}
        claims = self._site.worker("/internal/task-claim", wanted)["claims"]
        items = [fence(claim) | {"status": "Completed", "result": {"n": 1}} for claim in claims]
        self._site.worker("/internal/task-complete", {"items": items})
        return accepted

    def _received(self) -> list[Any]:
        for _ in range(_FEW):
            self._submitted(1)
        wanted = {"queue": "platform", "worker_id": "fuzz", "wait_seconds": 5, "max": 20, "visibility_seconds": 600}
        messages: list[Any] = self._site.worker("/internal/queue/receive", wanted)["messages"]
        return messages

    def _objects_of(self, claim: dict[str, Any]) -> tuple[str, str]:
        """Returns the object token of an attempt, and the prefix of its output, which contains an object."""
        url, headers = f"{self._site.internal_url}/v1/task/credentials", {CAPABILITY: claim["capability_token"]}
        minted = self._site.http.post(url, json=fence(claim), headers=headers).raise_for_status().json()
        prefix = str(minted["write_prefixes"][0]).removeprefix(f"file://{self._site.folder}/objects/")
        bearer = {"Authorization": f"Bearer {minted['object_token']}"}
        put = self._site.http.put(f"{self._site.gateway_url}/v1/objects/{prefix}a", content=b"a", headers=bearer)
        put.raise_for_status()
        return str(minted["object_token"]), prefix

    def _deployed(self, name: str, versions: int) -> None:
        for number in range(versions):
            self._site.user("POST", "/v1/dags", json={"yaml": dag_text(name, number)})

    def _building(self) -> str:
        """Creates a DAG with a current version, a retired one, and one that waits for a worker that does not exist."""
        name = f"dag-{uuid4()}"
        self._deployed(name, 2)
        told = {"events": [{"start": 0, "end": 9}]}
        self._site.user("POST", f"/v1/dags/{name}/jobs/feed/events", json=told)
        self._site.user("POST", "/v1/dags", json={"yaml": dag_text(name, 2)})
        return name

    def _backfill(self) -> str:
        """Creates a backfill that stays active: the queue of its job is full and has no worker."""
        request = {"start": 0, "end": 49}
        return str(
            self._site.user("POST", "/v1/dags/backfilled/jobs/derive/backfills", json=request)["backfill"]["run_id"]
        )

    def _asked(self, queries: int) -> list[str]:
        """Inserts records of exported queries, because no query service runs here."""
        exports = f"file://{self._site.folder.absolute()}/objects/exports/"
        with psycopg.connect(self._site.state_url) as connection:
            rows = connection.execute(
                "insert into interlock.query_audit"
                " (org_id, user_name, mode, sql_sha256, outcome, export_prefix, export_files)"
                " select org_id, 'ada', 'interactive', '', 'Completed', %s || 'x/',"
                " json_build_array(json_build_object('uri', %s || 'x/result.parquet', 'bytes', 1))"
                " from interlock.orgs o, generate_series(1, %s) where o.name = %s returning query_id::text",
                [exports, exports, queries, ORG],
            ).fetchall()
        return [row[0] for row in rows]

    def _exports(self, exports: int) -> list[str]:
        """Inserts exports of ended runs, which stay in their first steps because no worker runs here."""
        with psycopg.connect(self._site.state_url) as connection:
            rows = connection.execute(
                "insert into interlock.exports (org_id, job_id, run_id, format, stretch, last_index)"
                " select org_id, %s, %s, 'zip', 10, 9 from interlock.orgs, generate_series(1, %s) where name = %s"
                " returning export_id::text",
                [self._done["job_id"], self._done["run_id"], exports, ORG],
            ).fetchall()
        return [row[0] for row in rows]

    def _secret(self) -> str:
        """Inserts it into the database, as below."""
        name = f"S{uuid4().hex}"
        with psycopg.connect(self._site.state_url) as connection:
            connection.execute(
                "insert into interlock.org_secrets (org_id, name, sealed, hosts, set_by)"
                " select org_id, %s, '', '{}', 'ada' from interlock.orgs where name = %s",
                [name, ORG],
            )
        return name

    def _webhooks(self, names: list[str]) -> list[str]:
        """Inserts them into the database: fuzzed requests may have used up the webhooks that an org may have."""
        with psycopg.connect(self._site.state_url) as connection:
            connection.execute(
                "insert into interlock.webhooks (org_id, name, url, events, sealed, created_by)"
                " select org_id, n, %s, '{run.failed}', 'secret', 'ada' from interlock.orgs, unnest(%s::text[]) n"
                " where name = %s",
                [UNREACHABLE, names, ORG],
            )
        return names

    def _service(self) -> str:
        name = f"s{uuid4().hex}"
        self._site.user("POST", "/v1/services", json={"name": name})
        return name

    def _limited(self) -> str:
        name = self._service()
        self._site.user("POST", "/v1/limits", json={"source": name, "rate": 5})
        return name

    def _command(self) -> str:
        """Creates a command with permission, route and limit, each of which can be removed."""
        entry = {"target": TARGET, "name": f"c{uuid4().hex}"}
        self._site.user("POST", "/v1/routes", json=entry | {"queue": "fuzzed", "dlq": "fuzzed-dlq"})
        self._site.user("POST", "/v1/acls", json=entry | {"source": TARGET})
        self._site.user("POST", "/v1/limits", json=entry | {"rate": 5})
        self._site.user("POST", "/v1/limits", json=entry | {"rate": 5, "source": TARGET})
        return entry["name"]

    def _change(self) -> str:
        entry = {"target": TARGET, "name": f"c{uuid4().hex}", "rate": 1}
        return str(self._site.user("POST", "/v1/limits", json=entry)["change_id"])

    def _alert(self) -> str:
        """Creates an alert that operators handle."""
        with psycopg.connect(self._site.state_url) as connection:
            row = connection.execute(
                "insert into interlock.bus_alerts (org_id, event, opened_at, told, sample, critical, unrouted)"
                " select org_id, %s, now(), 1, '{}', true, true from interlock.orgs where name = %s"
                " returning alert_id::text",
                [f"event-{uuid4()}", ORG],
            ).fetchone()
        assert row is not None
        return str(row[0])

    def _replay(self) -> str:
        wanted = {"origin": "dead-letters", "reason": "fuzz", "filters": {"queue": INBOX}, "rate": 1}
        return str(self._site.user("POST", "/v1/replays", json=wanted)["replay_id"])

    def _dead_deliveries(self, deliveries: int) -> list[str]:
        with psycopg.connect(self._site.state_url) as connection:
            rows = connection.execute(
                "insert into interlock.webhook_deliveries (org_id, webhook_id, event, body, status, ended_at)"
                " select org_id, webhook_id, 'webhook.test', '{}', 'Dead', now()"
                " from interlock.webhooks, generate_series(1, %s) where name = %s returning delivery_id::text",
                [deliveries, TOLD_WEBHOOK],
            ).fetchall()
        return [row[0] for row in rows]

    def _refused(self, batches: int) -> list[str]:
        """Inserts rejected batches as a sink would leave them; no sink runs here."""
        claim = self.take(RUNNING)
        grant = claim["task"]["outputs"][0]
        ref = {name: grant[name] for name in ("dataset_uuid", "dataset_version")}
        url, headers = f"{self._site.internal_url}/v1/task/buffer-publish", {CAPABILITY: claim["capability_token"]}
        bodies = [
            fence(claim) | ref | {"batch_uri": f"{grant['buffer_prefix']}{uuid4()}.jsonl", "record_count": 1}
            for _ in range(batches)
        ]
        replies = [self._site.http.post(url, json=body, headers=headers).raise_for_status().json() for body in bodies]
        ids = [str(reply["publish_id"]) for reply in replies]
        with psycopg.connect(self._site.state_url) as connection:
            connection.execute(
                "update interlock.buffer_publishes set status = 'Refused' where publish_id = any(%s::uuid[])", [ids]
            )
        return ids

    def _sources(self) -> Any:
        """Deploys a DAG with sources, and returns the secret of a hook that nothing changes."""
        self._site.user("POST", "/v1/dags", json={"yaml": _SOURCES})
        return self._site.user("POST", f"/v1/dags/{SOURCES_DAG}/jobs/called/secret", json={})

    def _key(self) -> Any:
        return self._site.user("POST", "/v1/keys", json={"user": "spare"})

    def _member(self) -> str:
        return str(self._site.user("POST", "/v1/members", json={"subject": f"fuzz|{uuid4()}"})["subject"])

    def _bundle(self) -> str:
        return str(self._site.user("POST", "/v1/bundles", content=zipped({"main.py": f"# {uuid4()}"}))["sha256"])

    def _token(self) -> Any:
        return self._site.user("POST", "/v1/worker-tokens", json={"name": "spare"})


def make_whole(value: Any) -> None:
    """Combines values that are only useful together; drawn independently, they would hardly ever match."""
    if isinstance(value, dict):
        if value.get("lease_token") == LEASE:
            value |= {"run_id": HELD_RUN, "attempt": 1} if "run_id" in value else {"task_id": RUNNING, "attempt": 1}
        if value.get("dataset_uuid") == DATASET:
            value["dataset_version"] = VERSION
        if value.get("message_id") == MESSAGE:
            value["receipt"] = RECEIPT
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        make_whole(part)


def names_of(claim: dict[str, Any]) -> Names:
    prefix = claim["task"]["outputs"][0]["buffer_prefix"]
    return {RUNNING: claim["task_id"], LEASE: claim["lease_token"], BATCH: f"{prefix}part-1.jsonl"}
