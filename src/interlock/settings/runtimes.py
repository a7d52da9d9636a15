"""Where jobs run, and the names of queues that are no runtime's."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

BUFFER_QUEUE = "buffer"
"""Pointers to published batches of buffered datasets."""
INGEST_QUEUE = "ingest"
"""Runs whose tasks are to be made of a staged list."""


class RuntimeKind(StrEnum):
    QUEUE = "queue"
    """A worker receives a wake-up from the runtime's queue and claims."""
    INLINE = "inline"
    """The dispatcher itself runs it, from the outbox."""
    INVOKE = "invoke"
    """The dispatcher takes the lease and invokes a runner."""


class Runtime(BaseModel):
    """How jobs of one runtime execute, and what they get when their policy is silent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: RuntimeKind = RuntimeKind.QUEUE
    queue: str = ""
    """Name of the task queue; empty takes the runtime's own name."""
    alias_of: str | None = None
    lease_seconds: float = Field(60.0, gt=0)
    timeout_seconds: float = Field(3600.0, gt=0)
    memory_mb: int | None = None
    """Address-space limit of a child process, in MiB; unset for none."""
    image: str | None = None
    """Container image for deployments that start workers by image."""
    spark: bool = False
    """Tasks run in one Spark session of the worker, not in child processes of their own."""


BUILT_IN_RUNTIMES: dict[str, Runtime] = {
    "dispatcher": Runtime(kind=RuntimeKind.INLINE, lease_seconds=30, timeout_seconds=300),
    "lambda": Runtime(kind=RuntimeKind.INVOKE, timeout_seconds=900, memory_mb=1024),
    "platform": Runtime(),
    "ecs_platform": Runtime(alias_of="platform"),
    "udf": Runtime(memory_mb=1024, timeout_seconds=900),
    "ecs_udf": Runtime(alias_of="udf"),
    "spark": Runtime(spark=True, timeout_seconds=4 * 3600),
}
