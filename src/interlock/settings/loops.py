"""Loops of the dispatcher, the sink and its upkeep, and workers."""

from __future__ import annotations

from pydantic import Field

from interlock.settings.area import Area, HostAndPort


class Loops(Area):
    """How often a loop looks, and how much it takes at once."""

    # Loops of the dispatcher: pause between two passes that found nothing to do
    relay_seconds: float = Field(0.5, gt=0, description="Outbox relay.")
    retry_seconds: float = Field(0.25, gt=0, description="Retry scheduler.")
    reap_seconds: float = Field(0.5, gt=0, description="Lease reaper and hard timeouts.")
    fold_seconds: float = Field(0.1, gt=0, description="Run counters and run ends.")
    reconcile_seconds: float = Field(30.0, gt=0, description="Queued tasks without a message.")
    reconcile_grace_seconds: float = Field(60.0, ge=0, description="A queued task younger than this is left alone.")
    retention_seconds: float = Field(60.0, gt=0, description="Retention of runs, keys and idempotency records.")
    source_seconds: float = Field(1.0, gt=0, description="Sources that are always on.")
    schedule_seconds: float = Field(1.0, gt=0, description="Cron schedules, in `interlock scheduler`.")
    pressure_seconds: float = Field(1.0, gt=0, description="Queues against their max_queue_depth and max_queue_age.")
    sweep_seconds: float = Field(60.0, gt=0, description="Files of datasets that nobody needs any more.")
    sweep_grace_seconds: float = Field(
        600.0, ge=0, description="Files of an attempt that did not commit are deleted this long after it has ended."
    )
    replaced_files_seconds: float = Field(
        6 * 3600.0,
        ge=0,
        description="Files that were replaced stay this long for those who read them: longer than any task may take.",
    )
    sink_batch_limit_bytes: int = Field(
        1 << 30, ge=1, description="Largest batch of a buffered dataset; the sink refuses larger ones."
    )
    sink_spark_bytes: int = Field(
        256 << 20,
        ge=1,
        description="Batches of one dataset that wait and have together so many bytes are loaded by a task on Spark, "
        "if a Spark worker is there.",
    )
    sink_tries: int = Field(
        15, ge=1, description="How often the sink tries a batch while a store is away, up to queue_max_receives."
    )
    sink_metrics: HostAndPort | None = Field(
        None, description="Loopback host:port under which a sink serves its own metrics; unset: it does not."
    )
    buffer_keep_seconds: float = Field(
        86_400.0, ge=0, description="The file of a batch is deleted this long after its rows were loaded."
    )
    buffer_refused_days: float = Field(
        14.0, gt=0, description="The file of a batch that was refused is kept so long, to be redriven."
    )
    backfill_seconds: float = Field(0.5, gt=0, description="Tasks of backfills, handed out as their queue has room.")
    backpressure_escalate_seconds: float = Field(
        5.0,
        ge=0,
        description="How long only bulk work is held back for a queue past its limit, before everything upstream is; "
        "0: everything at once.",
    )

    # Workers
    worker_concurrency: int = Field(0, ge=0, le=1000, description="Child processes of a worker; 0: one per core.")
    drain_seconds: float = Field(
        10.0, ge=0, description="How long a drain lets running tasks finish before giving them back."
    )
