"""Logs and metrics. No secret, token or payload reaches either."""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

REGISTRY: Final = CollectorRegistry()

TASKS_CREATED = Counter("interlock_tasks_created", "Tasks created.", ["runtime"], registry=REGISTRY)
LIMITS_UNAVAILABLE = Counter(
    "interlock_limits_unavailable",
    "Checks of a limit while Valkey did not respond: task ranges deferred, requests counted per process.",
    ["limit"],
    registry=REGISTRY,
)
TASKS_CLAIMED = Counter("interlock_tasks_claimed", "Attempts started.", registry=REGISTRY)
ATTEMPTS_ENDED = Counter(
    "interlock_attempts_ended",
    "Attempts ended by a report, by the task's new status.",
    ["outcome"],
    registry=REGISTRY,
)
FILES_SWEPT = Counter(
    "interlock_files_swept", "Dataset files deleted because nothing references them.", registry=REGISTRY
)
SINK_BATCHES = Counter(
    "interlock_sink_batches",
    "Published batches received by the sink, by result.",
    ["result"],
    registry=REGISTRY,
)
SINK_ROWS = Counter("interlock_sink_rows", "Rows loaded by the sink.", registry=REGISTRY)
INGESTS = Counter("interlock_ingests", "Staged lists processed, by result.", ["result"], registry=REGISTRY)
INGEST_ROWS = Counter("interlock_ingest_rows", "Tasks created from staged lists.", registry=REGISTRY)
TASKS_REAPED = Counter("interlock_tasks_reaped", "Attempts ended by the reaper.", ["cause"], registry=REGISTRY)
TASKS_REQUEUED = Counter("interlock_tasks_requeued", "Failed tasks queued for their next attempt.", registry=REGISTRY)
TASKS_ROUTED = Counter("interlock_tasks_routed", "Tasks created for dataset events.", ["by"], registry=REGISTRY)
SOURCE_RESTARTS = Counter("interlock_source_restarts", "Restarts of always-on sources.", ["cause"], registry=REGISTRY)
LOOP_PASSES = Counter("interlock_loop_passes", "Passes of background loops.", ["loop", "result"], registry=REGISTRY)
SET_ASIDE = Counter(
    "interlock_set_aside",
    "Items that a loop or a batch skipped because they cannot be processed.",
    ["loop"],
    registry=REGISTRY,
)
LOOP_SECONDS = Histogram("interlock_loop_seconds", "Duration of one pass.", ["loop"], registry=REGISTRY)
REQUESTS = Counter("interlock_http_requests", "Requests answered.", ["listener", "route", "status"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "interlock_http_request_seconds",
    "Time to the end of the response.",
    ["listener", "route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30),
    registry=REGISTRY,
)
CONNECTIONS_REFUSED = Counter(
    "interlock_connections_refused",
    "HTTP connections closed because the client exceeded a limit.",
    ["reason"],
    registry=REGISTRY,
)
QUEUE_DEPTH = Gauge("interlock_queue_depth", "Visible messages, counted up to 100,000.", ["queue"], registry=REGISTRY)
QUEUE_IN_FLIGHT = Gauge(
    "interlock_queue_in_flight", "Messages received and not yet settled.", ["queue"], registry=REGISTRY
)
QUEUE_OLDEST = Gauge(
    "interlock_queue_oldest_seconds", "Age of the oldest visible message.", ["queue"], registry=REGISTRY
)
QUEUE_DEAD = Gauge("interlock_queue_dead_letters", "Dead letters.", ["queue"], registry=REGISTRY)
IN_FLIGHT = Gauge("interlock_tasks_in_flight", "Attempts running now.", ["operator", "runtime"], registry=REGISTRY)
OUTBOX_ROWS = Gauge("interlock_outbox_rows", "Pending side effects, counted up to 100,000.", registry=REGISTRY)
JOBS_HELD_BACK = Gauge(
    "interlock_jobs_held_back", "Jobs under backpressure: bulk tasks only, or all tasks.", ["level"], registry=REGISTRY
)
CREDENTIALS_MINTED = Counter(
    "interlock_credentials_minted", "Object store credentials issued to attempts.", ["scheme"], registry=REGISTRY
)
INVOCATIONS = Counter(
    "interlock_invocations", "Invocations of the runner for untrusted code, by outcome.", ["outcome"], registry=REGISTRY
)
INVOCATIONS_OPEN = Gauge("interlock_invocations_open", "Invocations in progress.", registry=REGISTRY)
QUERIES = Counter("interlock_queries", "Queries ended.", ["outcome"], registry=REGISTRY)
QUERY_SECONDS = Histogram(
    "interlock_query_seconds",
    "Duration of a query, from its audit record to the end of the response.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
    registry=REGISTRY,
)
QUERIES_RUNNING = Gauge("interlock_queries_running", "Queries that hold a slot.", registry=REGISTRY)
QUERIES_WAITING = Gauge("interlock_queries_waiting", "Queries that wait for a slot.", registry=REGISTRY)
RUNNER_INVOCATIONS = Counter(
    "interlock_runner_invocations", "Invocations that a runner finished.", ["outcome"], registry=REGISTRY
)
RUNNER_INVOCATIONS_OPEN = Gauge(
    "interlock_runner_invocations_open", "Invocations that a runner has in progress.", registry=REGISTRY
)
WEBHOOK_DELIVERIES = Counter(
    "interlock_webhook_deliveries", "Webhook deliveries, by outcome.", ["outcome"], registry=REGISTRY
)
LOG_LINES_LOST = Counter("interlock_log_lines_lost", "Log lines that could not be written.", registry=REGISTRY)


def metrics_text() -> bytes:
    return generate_latest(REGISTRY)


_SECRET_KEY = re.compile(r"(token|secret|password|authorization|api_key|payload|result|sql|url)", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"(il[kw]_[0-9a-f]{16}_)[A-Za-z0-9_-]{43}|(eyJ[A-Za-z0-9_-]{5,}\.)[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*|(://[^:/@\s]*:)[^@\s]+(?=@)"
)
_KEPT = frozenset({"token_id", "result_bytes", "lease_token_id"})


def redact(text: str) -> str:
    """Masks Interlock credentials, JWTs and passwords in URLs."""
    return _SECRET_VALUE.sub(lambda m: f"{next(g for g in m.groups() if g)}***", text)


def _redact_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if _SECRET_KEY.search(key) and key not in _KEPT:
            event[key] = "***"
        elif isinstance(value, str):
            event[key] = redact(value)
    return event


class _LossyErrors(logging.Handler):
    """Drops log lines that cannot be written, for example on a full disk.

    The default handler prints the error to stderr, which may be on the same full disk.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's name
        LOG_LINES_LOST.inc()


class _Stderr(_LossyErrors, logging.StreamHandler[TextIO]):
    pass


class _File(_LossyErrors, logging.handlers.RotatingFileHandler):
    pass


def configure(level: str = "info", form: str = "auto", *, process: str, file: Path | None = None) -> None:
    """Configures structured logging to stderr and optionally to a file that rotates at 10 MiB."""
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    root = logging.getLogger()
    root.handlers = [_handler(_Stderr(sys.stderr), shared, text=text)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        rotating = _File(file, maxBytes=10 * 1024 * 1024, backupCount=3, delay=True)
        root.handlers.append(_handler(rotating, shared, text=False))
    root.setLevel(level.upper())


def _handler(handler: logging.Handler, shared: list[Any], *, text: bool) -> logging.Handler:
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
        if text
        else structlog.processors.JSONRenderer()
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    return handler
