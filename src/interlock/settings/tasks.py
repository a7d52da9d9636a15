"""Settings of jobs, runtimes, queues, background loops and workers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from interlock.settings.base import Area, HostAndPort

BUFFER_QUEUE = "buffer"
"""Messages that point to published batches of buffered datasets."""
INGEST_QUEUE = "ingest"
"""Runs whose tasks must be created from a staged list."""


class RuntimeKind(StrEnum):
    QUEUE = "queue"
    """A worker receives a wake-up from the queue of the runtime and claims tasks."""
    INLINE = "inline"
    """The dispatcher executes the task itself, from the outbox."""
    INVOKE = "invoke"
    """The dispatcher takes the lease and invokes a runner."""


class Runtime(BaseModel):
    """The execution of jobs of one runtime, and the defaults for jobs whose policy sets no value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: RuntimeKind = RuntimeKind.QUEUE
    queue: str = ""
    """Name of the task queue; empty: the name of the runtime."""
    alias_of: str | None = None
    lease_seconds: float = Field(60.0, gt=0)
    timeout_seconds: float = Field(3600.0, gt=0)
    memory_mb: int | None = None
    """Address space limit of a child process, in MiB; unset: no limit."""
    image: str | None = None
    """Container image, for deployments that start workers by image."""
    spark: bool = False
    """True if tasks run in the worker's Spark session instead of child processes."""


BUILT_IN_RUNTIMES: dict[str, Runtime] = {
    "dispatcher": Runtime(kind=RuntimeKind.INLINE, lease_seconds=30, timeout_seconds=300),
    "lambda": Runtime(kind=RuntimeKind.INVOKE, timeout_seconds=900, memory_mb=1024),
    "platform": Runtime(),
    "ecs_platform": Runtime(alias_of="platform"),
    "udf": Runtime(memory_mb=1024, timeout_seconds=900),
    "ecs_udf": Runtime(alias_of="udf"),
    "spark": Runtime(spark=True, timeout_seconds=4 * 3600),
}


class Tasks(Area):
    """Settings of jobs and tasks, from submission to retention."""

    # Jobs and tasks
    sync_threshold: int = Field(
        1000,
        ge=1,
        le=10_000,
        description="A POST /v1/jobs with more tasks returns immediately, and the tasks are created in the background.",
    )
    batch_limit: int = Field(
        10_000, ge=1, le=100_000, description="Maximum number of tasks in one POST /v1/jobs/{job}/tasks."
    )
    shard_threshold: int = Field(
        10_000, ge=1, description="A run of a staged list with at least this many tasks gets its own table partition."
    )
    spark_threshold_bytes: int = Field(
        8 << 30,
        ge=1,
        description="A staged list of uncompressed JSONL or lines with at least this many bytes is read by Spark, if a "
        "Spark worker is running.",
    )
    upload_hours: float = Field(
        24.0,
        gt=0,
        le=7 * 24,
        description="Lifetime of upload URLs. A staged list is kept for the same time after that, or after its run "
        "started.",
    )
    ingest_concurrency: int = Field(
        2, ge=1, le=100, description="Staged lists that one ingest process reads concurrently."
    )
    ingest_metrics: HostAndPort | None = Field(
        None,
        description="Loopback host:port where an ingest process serves its metrics, for API keys with the scope "
        "platform; unset: no metrics.",
    )
    ingest_tries: int = Field(
        15, ge=1, description="Attempts to read a staged list while a store is unavailable, up to queue_max_receives."
    )
    range_size: int = Field(100, ge=1, le=10_000, description="Tasks of a run per queue message.")
    result_limit_bytes: int = Field(
        1 << 20,
        ge=0,
        le=64 << 20,
        description="Maximum size of the result of a task, including a body that http_fetch returns; a larger one "
        "fails the task. A worker and a dispatcher hold several results in memory at a time.",
    )
    result_inline_bytes: int = Field(
        1024,
        ge=0,
        description="Results of run tasks up to this size are stored in the state database; larger ones are packed "
        "into objects.",
    )
    task_log_bytes: int = Field(
        262_144,
        ge=0,
        le=16 << 20,
        description="Size up to which the output of an attempt is kept: the first half from its beginning, the rest "
        "from its end. 0: no output is kept.",
    )
    export_days: float = Field(7.0, gt=0, description="Files of exported runs are deleted after this time.")
    payload_limit_bytes: int = Field(262_144, ge=1024, description="Maximum size of the payload of a task.")
    idempotency_hours: float = Field(24.0, gt=0, description="Time for which an Idempotency-Key is remembered.")
    retention_days: float = Field(
        14.0,
        gt=0,
        description="Ended runs and their tasks, ended tasks of DAGs, and dataset events are deleted after this time.",
    )
    operators: list[str] = Field(
        default_factory=list,
        description="Folders and Python modules with operators that a worker runs, in addition to --operators; empty: "
        "only the built-in operators, and with `interlock up` also those of the folder in which it is started.",
    )
    reload: bool | None = Field(
        None,
        description="A worker whose operator files were edited runs the next task with the new code. Unset: on with "
        "`interlock up`, off with `interlock serve worker`, which reloads on SIGHUP.",
    )
    operator_hours: float = Field(
        168.0,
        gt=0,
        description="Jobs may use an operator for this long after a worker last reported it.",
    )
    secret_dirs: list[Path] = Field(
        default_factory=list,
        description="Folders that operator code of a worker cannot open, in addition to `dir`; needs Linux with "
        "Landlock.",
    )
    runtimes: dict[str, Runtime] = Field(
        default_factory=dict, description="Runtimes that extend or replace the built-in ones."
    )

    # Queues
    queue_direct: bool = Field(
        True,
        description="Insert task messages in the same transaction; false: through the outbox and the relay.",
    )
    queue_max_receives: int = Field(20, ge=1, description="A message received more often becomes a dead letter.")
    bulk_share: float = Field(
        0.1, ge=0, le=1, description="Share of receives that prefer bulk messages, so that bulk work never starves."
    )

    @model_validator(mode="after")
    def _known_runtimes(self) -> Self:
        for name in self.runtimes:
            self.runtime(name)
        return self

    def runtime(self, name: str) -> Runtime:
        """Resolves a name or an alias to its runtime, with the queue filled in. Raises KeyError for an unknown name."""
        known = BUILT_IN_RUNTIMES | self.runtimes
        runtime = known[name]
        while runtime.alias_of is not None:
            name = runtime.alias_of
            if name not in known:
                raise ValueError(
                    f"runtimes: alias_of {name!r} is not a known runtime; known: {', '.join(sorted(known))}"
                )
            runtime = known[name]
        return runtime if runtime.queue else runtime.model_copy(update={"queue": name})

    @property
    def runtime_names(self) -> list[str]:
        return sorted(BUILT_IN_RUNTIMES | self.runtimes)

    @property
    def queues(self) -> list[str]:
        names = {self.runtime(n).queue for n in self.runtime_names if self.runtime(n).kind is RuntimeKind.QUEUE}
        return sorted(names | {BUFFER_QUEUE, INGEST_QUEUE})


class Loops(Area):
    """Intervals and batch sizes of background loops."""

    # Loops of the dispatcher: the interval is the pause after a pass that found no work
    relay_seconds: float = Field(0.5, gt=0, description="Interval of the outbox relay.")
    retry_seconds: float = Field(0.25, gt=0, description="Interval of the retry scheduler.")
    reap_seconds: float = Field(0.5, gt=0, description="Interval of the reaper of expired leases and hard timeouts.")
    fold_seconds: float = Field(0.1, gt=0, description="Interval at which run counters are updated and runs are ended.")
    reconcile_seconds: float = Field(
        30.0, gt=0, description="Interval of the search for queued tasks without a message."
    )
    reconcile_grace_seconds: float = Field(
        60.0, ge=0, description="That search skips tasks queued more recently than this."
    )
    retention_seconds: float = Field(
        60.0, gt=0, description="Interval of the deletion of expired runs, keys and idempotency records."
    )
    source_seconds: float = Field(1.0, gt=0, description="Interval of the check of always-on sources.")
    schedule_seconds: float = Field(
        1.0, gt=0, description="Interval of cron schedules, in `interlock serve scheduler`."
    )
    pressure_seconds: float = Field(
        1.0, gt=0, description="Interval at which queues are compared with max_queue_depth and max_queue_age."
    )
    sweep_seconds: float = Field(60.0, gt=0, description="Interval of the deletion of unreferenced dataset files.")
    sweep_grace_seconds: float = Field(
        600.0, ge=0, description="Files of an attempt that did not commit are deleted this long after its end."
    )
    replaced_files_seconds: float = Field(
        6 * 3600.0,
        ge=0,
        description="Replaced files are kept this long for their readers; must exceed the longest task timeout.",
    )
    sink_batch_limit_bytes: int = Field(
        1 << 30, ge=1, description="Maximum size of a batch of a buffered dataset; the sink rejects larger ones."
    )
    sink_spark_bytes: int = Field(
        256 << 20,
        ge=1,
        description="If the waiting batches of one dataset have this many bytes in total, a Spark task loads them, "
        "provided that a Spark worker is running.",
    )
    sink_tries: int = Field(
        15, ge=1, description="Attempts to load a batch while a store is unavailable, up to queue_max_receives."
    )
    sink_metrics: HostAndPort | None = Field(
        None,
        description="Loopback host:port where a sink serves its own metrics, for API keys with the scope "
        "platform; unset: no metrics.",
    )
    buffer_keep_seconds: float = Field(
        86_400.0, ge=0, description="The file of a batch is deleted this long after its rows were loaded."
    )
    buffer_refused_days: float = Field(
        14.0, gt=0, description="The file of a rejected batch is kept this long, so that it can be redriven."
    )
    backfill_seconds: float = Field(
        0.5, gt=0, description="Interval at which backfills release tasks, while their queue has room."
    )
    backpressure_escalate_seconds: float = Field(
        5.0,
        ge=0,
        description="While a queue is over its limit, only bulk work upstream is held back for this long, then all "
        "work; 0: all work immediately.",
    )

    # Workers
    worker_concurrency: int = Field(0, ge=0, le=1000, description="Child processes of a worker; 0: one per core.")
    worker_always_on: int = Field(
        16,
        ge=0,
        le=1000,
        description="Always-on sources that a worker runs beside its other tasks, each in one more child process; 0: "
        "they occupy the child processes of tasks.",
    )
    drain_seconds: float = Field(
        10.0, ge=0, description="Time that a graceful shutdown gives running tasks before it releases them."
    )
