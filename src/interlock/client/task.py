"""The task SDK, for user code that runs as a handler.

    from interlock.client.task import Task

    def handler(event: dict, task: Task) -> dict | None:
        rows = task.query("select * from transfers where value > 1000")
        task.publish({"id": row["id"], "value": row["value"]} for row in rows)
        return {"alerts": len(rows)}

The return value of the handler is the task's result. An exception fails the attempt, with the exception's class name
and message. A background thread keeps the lease and the token alive.

The SDK is this one file and uses only the standard library, because it is installed next to user code without the rest
of Interlock.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

TOKEN = "TRACE_TASK_CAPABILITY_TOKEN"  # noqa: S105 - the name of a variable
MARKER = "_marker.json"
_PATIENCE_SECONDS = 60.0
_ONE_CALL_SECONDS = 120.0
_FIRST_PAUSE_SECONDS = 0.2
_BEAT_SECONDS = 30.0
_CREDENTIALS_SPARE_SECONDS = 30.0
_LONGEST_NAME, _LONGEST_TEXT = 200, 9_000
_WHOLE = ("BIGINT", "HUGEINT", "UBIGINT", "UHUGEINT", "INTEGER", "UINTEGER")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuses all redirects, so that the token is sent to the platform only."""


# Proxy variables of the environment are ignored.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


class TaskError(Exception):
    """The platform refused a call. `code` is for programs."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code


class Fenced(TaskError):
    """The attempt no longer holds its lease. Its further writes are rejected."""


class Rows(list[dict[str, Any]]):
    """The rows of a query, each a dict by column name."""

    columns: list[str]
    truncated: bool
    """The result had more rows than the service returns: narrow the query, or use `query_arrow`."""

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Rows:
        columns = [(column["name"], _reader(column["type"])) for column in reply["columns"]]
        rows = cls(
            {name: read(value) for (name, read), value in zip(columns, row, strict=True)} for row in reply["rows"]
        )
        rows.columns = [name for name, _ in columns]
        rows.truncated = reply["truncated"]
        return rows


class Task:
    """One attempt of a task. `event` is the event that the attempt was started with."""

    def __init__(self, event: Mapping[str, Any], *, token: str | None = None, keep_alive: bool = True) -> None:
        self.event = event
        self.task_id: str = event["task_id"]
        self.attempt: int = event["attempt"]
        self.job: Mapping[str, Any] = event.get("job") or {}
        self.config: Mapping[str, Any] = event.get("config") or {}
        self.payload: Any = event.get("payload")
        self.inputs: list[Mapping[str, Any]] = list(event.get("inputs") or ())
        self.outputs: list[Mapping[str, Any]] = list(event.get("outputs") or ())
        self.cancel_requested = False
        self.paused = False
        """A source must produce nothing new while jobs downstream are behind. Each heartbeat updates this."""
        self.ended = False
        """The outcome of the attempt has been reported by `complete`, `fail` or `canceled`."""
        self._token = token or os.environ.get(TOKEN) or event["capability_token"]
        self._committed: list[dict[str, Any]] = []
        self._final_events: list[dict[str, Any]] = []
        self._store: _Store | None = None
        self._over = threading.Event()
        if keep_alive:
            self._start_beating()

    @property
    def start(self) -> int | None:
        """The first value of the task's range."""
        return self._scope("start")

    @property
    def end(self) -> int | None:
        """The last value of the task's range."""
        return self._scope("end")

    def _scope(self, name: str) -> int | None:
        return next((each[name] for each in self.inputs if each.get(name) is not None), None)

    # Read

    def query(self, sql: str, *, limit: int | None = None) -> Rows:
        """Runs one SELECT over the task's inputs, by their names."""
        return Rows.of(json.loads(self._query(sql, "json", limit)))

    def query_arrow(self, sql: str) -> bytes:
        """Like `query`, but returns an Arrow IPC stream, for large results: read it with `pyarrow.ipc`."""
        return self._query(sql, "arrow", None)

    def _query(self, sql: str, form: str, limit: int | None) -> bytes:
        body = self._fence | {"sql": sql, "format": form} | ({} if limit is None else {"limit": limit})
        return self._post(self._url("QUERY"), "/v1/task/query", body)

    def read(self, uri: str) -> bytes:
        """Returns the content of an object that the attempt may read."""
        return self._objects().get(uri)

    # Write

    def publish(self, rows: Iterable[Mapping[str, Any]] | str | Path, *, output: int = 0, count: int = -1) -> str:
        """Publishes rows, or a .jsonl or .parquet file, to a buffered output and returns the id of the batch.

        Idempotent: the same rows are the same batch. `count`, the number of rows, is required for a Parquet file.
        """
        if isinstance(rows, str | Path):
            data, suffix = Path(rows).read_bytes(), Path(rows).suffix
        else:
            data, suffix = b"".join(_line(row) for row in rows), ".jsonl"
        if count < 0 and suffix != ".jsonl":
            raise ValueError("a Parquet file needs its number of rows: publish(path, count=...)")
        grant = self.outputs[output]
        uri = f"{grant['buffer_prefix']}batch-{hashlib.sha256(data).hexdigest()[:32]}{suffix}"
        self._objects().put(uri, data)
        body = _dataset(grant) | {"batch_uri": uri, "record_count": data.count(b"\n") if count < 0 else count}
        reply = json.loads(self._post(self._url("DISPATCHER"), "/v1/task/buffer-publish", self._fence | body))
        return str(reply["publish_id"])

    def write_output(
        self,
        data: bytes | str | Path,
        *,
        columns: Sequence[Mapping[str, Any]],
        row_count: int,
        output: int = 0,
        start: int | None = None,
        end: int | None = None,
        range_column: str | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> str:
        """Writes a Parquet file as a partition of an output. It becomes visible to others when the attempt completes.

        Columns are {name, type, nullable}, with Spark's type names. `bounds` are the smallest and the largest value of
        the range column. `start` and `end` default to the range of the task.
        """
        content = data if isinstance(data, bytes) else Path(data).read_bytes()
        grant = self.outputs[output]
        first, last = _range(start if start is not None else self.start, end if end is not None else self.end)
        file = f"part_{first}_{last}.parquet"
        facts: dict[str, Any] = {"row_count": row_count, "bytes": len(content)}
        if bounds is not None:
            facts |= {"min": bounds[0], "max": bounds[1]}
        marker = facts | {"file": file, "schema": {"columns": list(columns), "range_column": range_column}}
        self._objects().put(f"{grant['write_prefix']}{file}", content)
        # The marker goes last: it proves that the file is complete.
        self._objects().put(f"{grant['write_prefix']}{MARKER}", json.dumps(marker).encode())
        where = {"output_index": output, "start": first, "end": last, "location": f"{grant['write_prefix']}{file}"}
        self._committed.append(_dataset(grant) | where | facts)
        return str(where["location"])

    def emit(
        self, *, output: int = 0, cursor: int | None = None, start: int | None = None, end: int | None = None
    ) -> None:
        """Reports now that an output has changed: up to a cursor, or within a range."""
        self.events([_event(self.outputs[output], cursor, start, end)])

    def events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Sends events in the dispatcher's own format."""
        self._post(self._url("DISPATCHER"), "/v1/task/events", self._fence | {"events": list(events)})

    def emit_at_end(
        self, *, output: int = 0, cursor: int | None = None, start: int | None = None, end: int | None = None
    ) -> None:
        """Like `emit`, but sends the event with the completion, and only if the attempt completes."""
        self._final_events.append(_event(self.outputs[output], cursor, start, end))

    # Progress

    def progress(self, fraction: float, text: str | None = None) -> bool:
        """Reports progress from 0 to 1. Returns False if the task should stop."""
        return self.heartbeat(progress=fraction, progress_text=text)

    def heartbeat(self, **fields: Any) -> bool:
        """Extends the lease now; the background thread also does so regularly.

        Returns False if the task should stop.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        reply = json.loads(self._post(self._url("DISPATCHER"), "/v1/task/heartbeat", self._fence | given))
        self._token = reply.get("capability_token") or self._token
        self.cancel_requested = self.cancel_requested or reply.get("cancel_requested", False)
        self.paused = reply.get("paused", False)
        return not self.cancel_requested

    def _start_beating(self) -> None:
        # If no thread can be started, only the dispatcher's own renewal keeps the lease, and the token is not renewed.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            try:
                self.heartbeat()
            except Fenced:
                return
            except TaskError:
                # A later heartbeat may succeed. Calls of the handler raise their own errors.
                continue

    # The end

    def complete(self, result: Any = None) -> None:
        """Completes the attempt with its result, outputs and events. Outputs are not visible before this."""
        body: dict[str, Any] = {"status": "Completed"}
        if result is not None:
            body["result"] = result
        self._report(body | {"outputs": self._committed, "events": self._final_events})

    def fail(self, error_class: str, message: str) -> None:
        """Fails the attempt. The job's policy decides whether it is retried."""
        error = {"error_class": error_class[:_LONGEST_NAME], "error_message": message[:_LONGEST_TEXT]}
        self._report({"status": "Failed"} | error)

    def canceled(self) -> None:
        """Reports that the attempt stopped on request."""
        self._report({"status": "Canceled"})

    def _report(self, body: dict[str, Any]) -> None:
        self._post(self._url("DISPATCHER"), "/v1/task/complete", self._fence | body)
        self.ended = True
        self._over.set()

    # Calls

    @property
    def _fence(self) -> dict[str, Any]:
        return {"task_id": self.task_id, "attempt": self.attempt, "lease_token": self.event["lease_token"]}

    def _url(self, service: str) -> str:
        """Prefers the environment variable: inside the sandbox, the platform may have another address than outside."""
        url = os.environ.get(f"TRACE_{service}_URL") or (self.event.get("endpoints") or {}).get(
            f"{service.lower()}_url"
        )
        if not url:
            raise TaskError(0, "no_endpoint", f"This installation has no {service.lower()} service for tasks.")
        return str(url).rstrip("/")

    def _post(self, url: str, path: str, body: Mapping[str, Any]) -> bytes:
        data = json.dumps(body, default=_plain).encode()

        def request() -> urllib.request.Request:
            headers = {"Content-Type": "application/json", "X-Trace-Task-Capability": self._token}
            return urllib.request.Request(url + path, data, headers)  # noqa: S310 - the platform's own address

        return _exchange(request)

    def _objects(self) -> _Store:
        if self._store is None or self._store.expires_soon:
            reply = json.loads(self._post(self._url("DISPATCHER"), "/v1/task/credentials", self._fence))
            self._store = _S3(reply, self._url) if reply["scheme"] == "s3" else _Gateway(reply, self._root, self._url)
        return self._store

    @property
    def _root(self) -> str:
        """The common root of all object URIs, derived from the prefixes of outputs and inputs."""
        for grant in self.event.get("outputs") or ():
            end = f"/buffers/{grant['dataset_uuid']}/{self.task_id}/{self.attempt}/"
            return str(grant["buffer_prefix"]).removesuffix(end)
        for granted in self.inputs:
            end = f"/dataset/{granted['dataset_uuid']}/version/{granted['dataset_version']}/"
            return str(granted["read_prefix"]).removesuffix(end)
        raise TaskError(0, "nothing_granted", "This task has no files to read and none to write.")


def run(handler: Callable[[Any, Task], Any], event: Mapping[str, Any]) -> int:
    """Calls a handler, reports the outcome, and returns an exit code for the process."""
    task = Task(event)
    try:
        result = handler(event, task)
        if not task.ended:
            task.complete(result)
    except Fenced:
        return 1
    except Exception as error:
        if not task.ended:
            task.fail(type(error).__name__, str(error))
        return 1
    return 0


# Stores


class _Store:
    def __init__(self, credentials: Mapping[str, Any]) -> None:
        self.credentials = credentials
        self._expires = datetime.fromisoformat(credentials["expiration"].replace("Z", "+00:00")).timestamp()

    @property
    def expires_soon(self) -> bool:
        return self._expires - time.time() < _CREDENTIALS_SPARE_SECONDS

    def request(self, method: str, uri: str, data: bytes | None) -> urllib.request.Request:
        raise NotImplementedError

    def put(self, uri: str, data: bytes) -> None:
        _exchange(lambda: self.request("PUT", uri, data))

    def get(self, uri: str) -> bytes:
        return _exchange(lambda: self.request("GET", uri, None))


class _Gateway(_Store):
    """A directory that the gateway serves to holders of an object token."""

    def __init__(self, credentials: Mapping[str, Any], root: str, url: Callable[[str], str]) -> None:
        super().__init__(credentials)
        self._root = root
        self._base = url("OBJECTS")

    def request(self, method: str, uri: str, data: bytes | None) -> urllib.request.Request:
        if not uri.startswith(f"{self._root}/"):
            raise ValueError(f"{uri} does not lie under {self._root}")
        target = f"{self._base}/v1/objects/{quote(uri[len(self._root) + 1 :])}"
        headers = {
            "Authorization": f"Bearer {self.credentials['object_token']}",
            "Content-Type": "application/octet-stream",
        }
        return urllib.request.Request(target, data, headers, method=method)  # noqa: S310 - as above


class _S3(_Store):
    """An S3 bucket, accessed with session credentials. Requests are signed with AWS Signature Version 4."""

    def __init__(self, credentials: Mapping[str, Any], url: Callable[[str], str]) -> None:
        super().__init__(credentials)
        self._region = credentials.get("region") or "us-east-1"
        self._base = url("OBJECTS")
        # The runner may forward to the bucket from another address: the store checks the signature for its own host.
        self._host = urlsplit(credentials.get("endpoint") or self._base).netloc

    def request(self, method: str, uri: str, data: bytes | None) -> urllib.request.Request:
        target = urlsplit(f"{self._base}/{quote(uri[len('s3://') :])}")
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": self._host,
            "x-amz-content-sha256": hashlib.sha256(data or b"").hexdigest(),
            "x-amz-date": moment,
            "x-amz-security-token": str(self.credentials["session_token"]),
        }
        signed = self._signed(method, target.path, headers, moment)
        return urllib.request.Request(target.geturl(), data, signed, method=method)  # noqa: S310 - as above

    def _signed(self, method: str, path: str, headers: dict[str, str], moment: str) -> dict[str, str]:
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = f"{method}\n{path}\n\n{lines}\n{names}\n{headers['x-amz-content-sha256']}"
        scope = f"{moment[:8]}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{self.credentials['secret_access_key']}".encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        proof = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        credential = f"{self.credentials['access_key_id']}/{scope}"
        authorization = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={proof}"
        # urllib would add its own content-type to a PUT with data; ours is not signed either, which is harmless.
        return {**headers, "authorization": authorization, "content-type": "application/octet-stream"}


# HTTP


def _exchange(request: Callable[[], urllib.request.Request]) -> bytes:
    """Sends a request and retries it. Every call is idempotent, by the fence or by its content."""
    deadline, pause = time.monotonic() + _PATIENCE_SECONDS, _FIRST_PAUSE_SECONDS
    while True:
        outcome = _try(request())
        if isinstance(outcome, bytes):
            return outcome
        if not _worth_retrying(outcome) or time.monotonic() + pause > deadline:
            raise outcome
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def _worth_retrying(error: TaskError) -> bool:
    return error.status in (0, 429) or error.status >= 500


def _try(request: urllib.request.Request) -> bytes | TaskError:
    try:
        with _opener.open(request, timeout=_ONE_CALL_SECONDS) as reply:
            body: bytes = reply.read()
            return body
    except urllib.error.HTTPError as error:
        return _refusal(error.code, error.read(100_000))
    except (OSError, http.client.HTTPException) as error:
        return TaskError(0, "unreachable", f"The platform does not answer: {error}")


def _refusal(status: int, body: bytes) -> TaskError:
    try:
        problem = json.loads(body)
        code, detail = str(problem.get("code", "")), str(problem.get("detail", ""))
    except (ValueError, AttributeError):
        code, detail = "", ""
    kind = Fenced if status == 409 and code == "fenced" else TaskError
    return kind(status, code, detail or f"The platform answered {status}.")


# Values


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, default=_plain, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Encodes values that JSON lacks, in the form that the sink reads."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _reader(kind: str) -> Callable[[Any], Any]:
    """Returns a decoder for a column type: JSON carries large numbers as text and bytes as base64."""
    if kind.startswith("DECIMAL"):
        return lambda value: None if value is None else Decimal(str(value))
    if kind in _WHOLE:
        return lambda value: None if value is None else int(value)
    if kind == "BLOB":
        return lambda value: None if value is None else base64.b64decode(value)
    return lambda value: value


def _dataset(grant: Mapping[str, Any]) -> dict[str, Any]:
    return {"dataset_uuid": grant["dataset_uuid"], "dataset_version": grant["dataset_version"]}


def _event(grant: Mapping[str, Any], cursor: int | None, start: int | None, end: int | None) -> dict[str, Any]:
    if cursor is not None:
        return _dataset(grant) | {"cursor": cursor}
    first, last = _range(start, end)
    return _dataset(grant) | {"partition_key": f"{first}-{last}", "start": first, "end": last}


def _range(start: int | None, end: int | None) -> tuple[int, int]:
    if start is None or end is None:
        raise ValueError("the task has no range: pass start and end")
    return start, end
