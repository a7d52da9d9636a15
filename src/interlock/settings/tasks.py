"""Jobs, their tasks and runtimes, and the queues of these."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from interlock.settings.area import Area, HostAndPort
from interlock.settings.runtimes import BUFFER_QUEUE, BUILT_IN_RUNTIMES, INGEST_QUEUE, Runtime, RuntimeKind


class Tasks(Area):
    """From a job's submission to the end of what is kept of it."""

    # Jobs and tasks
    sync_threshold: int = Field(
        1000,
        ge=1,
        le=10_000,
        description="A POST /v1/jobs with more tasks is answered at once, and they are made in the background.",
    )
    batch_limit: int = Field(
        10_000, ge=1, le=100_000, description="Most tasks one POST /v1/jobs/{job}/tasks may carry."
    )
    shard_threshold: int = Field(
        10_000, ge=1, description="A run of a staged list with so many tasks has a table of its own."
    )
    spark_threshold_bytes: int = Field(
        8 << 30,
        ge=1,
        description="A staged list of JSONL or lines that is not packed and has so many bytes is read by Spark, if a "
        "worker of it is there.",
    )
    upload_hours: float = Field(
        24.0,
        gt=0,
        le=7 * 24,
        description="Life of an upload's URLs; a staged list is kept so long after it, or after a run was made of it.",
    )
    ingest_concurrency: int = Field(2, ge=1, le=100, description="Staged lists that one ingest process reads at once.")
    ingest_metrics: HostAndPort | None = Field(
        None, description="Loopback host:port under which an ingest process serves its metrics; unset: it does not."
    )
    ingest_tries: int = Field(
        15, ge=1, description="How often a staged list is tried while a store is away, up to queue_max_receives."
    )
    range_size: int = Field(100, ge=1, le=10_000, description="Tasks behind one queue message of a run.")
    result_limit_bytes: int = Field(65_536, ge=0, description="Largest result of a task.")
    result_inline_bytes: int = Field(
        1024,
        ge=0,
        description="Results of tasks of runs up to this are kept in the state database; longer ones as objects, "
        "packed together.",
    )
    export_days: float = Field(7.0, gt=0, description="Files of exported runs are deleted after this.")
    payload_limit_bytes: int = Field(262_144, ge=1024, description="Largest payload of one task.")
    idempotency_hours: float = Field(24.0, gt=0, description="How long an Idempotency-Key is remembered.")
    retention_days: float = Field(
        14.0,
        gt=0,
        description="Ended runs and their tasks, ended tasks of DAGs, and events of datasets are deleted after this.",
    )
    operators: list[str] = Field(
        default_factory=list,
        description="Folders and Python modules whose declared operators a worker runs, beside those of --operators; "
        "empty: the built-in ones alone, and with `interlock up` those of the folder that it is started in.",
    )
    operator_hours: float = Field(
        168.0,
        gt=0,
        description="Jobs may name an operator for so long after a worker has last reported it.",
    )
    secret_dirs: list[Path] = Field(
        default_factory=list,
        description="Folders that operator code of a worker cannot open, beside `dir`; needs Linux with Landlock.",
    )
    runtimes: dict[str, Runtime] = Field(
        default_factory=dict, description="Added to, or replacing, the built-in runtimes."
    )

    # Queues
    queue_direct: bool = Field(
        True,
        description="Insert task messages in the transaction itself; false: through the outbox and the relay.",
    )
    queue_max_receives: int = Field(20, ge=1, description="A message received more often becomes a dead letter.")
    bulk_share: float = Field(
        0.1, ge=0, le=1, description="Share of receives that prefer bulk, so that it never starves."
    )

    @model_validator(mode="after")
    def _known_runtimes(self) -> Self:
        for name in self.runtimes:
            self.runtime(name)
        return self

    def runtime(self, name: str) -> Runtime:
        """The runtime behind a name or an alias, its queue filled in. KeyError when there is none."""
        known = BUILT_IN_RUNTIMES | self.runtimes
        runtime = known[name]
        while runtime.alias_of is not None:
            name = runtime.alias_of
            if name not in known:
                raise ValueError(f"runtimes: alias_of {name!r} names no runtime; known: {', '.join(sorted(known))}")
            runtime = known[name]
        return runtime if runtime.queue else runtime.model_copy(update={"queue": name})

    @property
    def runtime_names(self) -> list[str]:
        return sorted(BUILT_IN_RUNTIMES | self.runtimes)

    @property
    def queues(self) -> list[str]:
        names = {self.runtime(n).queue for n in self.runtime_names if self.runtime(n).kind is RuntimeKind.QUEUE}
        return sorted(names | {BUFFER_QUEUE, INGEST_QUEUE})
