"""Operators of crash tests. Each step is recorded in a file outside of the system, with one append."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from interlock.schemas import MARKER, Column, DatasetSchema, Marker
from interlock.wire.attempts import Event, Output, WriteGrant
from interlock.workers import TaskFailed, operator
from interlock.workers.context import TaskContext


def _note(ctx: TaskContext, step: str) -> None:
    """Uses O_APPEND and one write, so that lines are complete even if a process is killed."""
    journal = os.open(ctx.config["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(journal, f"{ctx.task_id} {ctx.attempt} {step} {os.getpid()}\n".encode())
    finally:
        os.close(journal)


def _written(grant: WriteGrant) -> str:
    """Writes a file, and its marker last."""
    folder = Path(grant.write_prefix.removeprefix("file://"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "part").write_bytes(b"")
    marker = Marker(file="part", row_count=0, bytes=0, schema=DatasetSchema([Column("n", "bigint")]))
    (folder / MARKER).write_bytes(msgspec.json.encode(marker))
    return f"{grant.write_prefix}part"


@operator("crash.work")
def work(payload: dict[str, Any], ctx: TaskContext) -> dict[str, int]:
    """Takes `seconds`, fails its first `failures` attempts, and emits and commits the outputs of its job.

    With `quiet` it emits nothing before its end.
    """
    _note(ctx, "began")
    if "gate" in payload and ctx.attempt == 1:
        Path(payload["gate"]).read_bytes()  # a named pipe: blocks until the test has opened and closed it
    if ctx.attempt <= payload.get("failures", 0):
        raise TaskFailed("told to fail", "Told")
    if seconds := payload.get("seconds"):
        time.sleep(seconds)  # noqa: TID251 - work that takes time, not a test that waits
    for grant in ctx.outputs:
        dataset, version, index = grant.dataset_uuid, grant.dataset_version, ctx.index or 0
        if not payload.get("quiet"):
            ctx.emit([Event(dataset_uuid=dataset, dataset_version=version, cursor=2 * index)])
            _note(ctx, "emitted")
        output = Output(dataset_uuid=dataset, dataset_version=version, location=f"{grant.write_prefix}part")
        ctx.commit([output], [Event(dataset_uuid=dataset, dataset_version=version, cursor=2 * index + 1)])
    _note(ctx, "ended")
    return {"attempt": ctx.attempt}


@operator("crash.hoard")
def hoard(payload: dict[str, Any], ctx: TaskContext) -> dict[str, int]:
    """The first attempt allocates memory until the kernel kills the process."""
    _note(ctx, "began")
    taken = []
    while ctx.attempt == 1:
        taken.append(bytearray(b"x") * (1 << 20))
    _note(ctx, "ended")
    return {"attempt": ctx.attempt}


@operator("crash.scope")
def scope(payload: dict[str, Any], ctx: TaskContext) -> dict[str, int]:
    """A job of a DAG: commits its scope of every output and emits an event."""
    _note(ctx, "began")
    span: dict[str, Any] = {"start": payload["start"], "end": payload["end"]}
    for grant in ctx.outputs:
        names: dict[str, Any] = {"dataset_uuid": grant.dataset_uuid, "dataset_version": grant.dataset_version}
        ctx.commit([Output(location=_written(grant), **names, **span)], [Event(**names, **span)])
    _note(ctx, "ended")
    return {"attempt": ctx.attempt}
