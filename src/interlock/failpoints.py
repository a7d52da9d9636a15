"""Named points in the code where a test can pause, fail or kill the process.

`INTERLOCK_FAILPOINTS="claim.committed=kill,complete.before_commit=error"` arms failpoints through the environment. A
test in the same process calls `arm(name, action)`. An unarmed failpoint costs one dictionary lookup.

Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP, once; the process continues after SIGCONT), `error` (raises
FailpointError), or an async callable.
A trailing `*N` skips the first N passes: `claim.committed=kill*3`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Final

Action = Callable[[], Awaitable[None]]


class FailpointError(RuntimeError):
    """Raised by a failpoint armed with `error`."""


_armed: dict[str, Action] = {}


async def failpoint(name: str) -> None:
    if _armed and (action := _armed.get(name)):
        await action()


def armed(name: str) -> bool:
    """Returns True if the failpoint is armed.

    Code that needs only one statement checks this, to open a transaction just for a failpoint before its commit.
    """
    return name in _armed


def arm(name: str, action: Action) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown failpoint {name!r}; known: {', '.join(sorted(NAMES))}")
    _armed[name] = action


def disarm(name: str) -> None:
    _armed.pop(name, None)


def arm_from_environment(value: str | None) -> None:
    for part in filter(None, (value or "").split(",")):
        name, _, action = part.partition("=")
        action, _, skip = action.partition("*")
        arm(name.strip(), _named_action(name, action, int(skip or 0)))


def _named_action(name: str, action: str, skip: int) -> Action:
    if action not in ("kill", "stop", "error"):
        raise ValueError(f"failpoint {name!r}: action must be kill, stop or error, got {action!r}")
    passes = 0

    async def act() -> None:
        nonlocal passes
        passes += 1
        if passes <= skip:
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "error":
            raise FailpointError(name)
        elif passes == skip + 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    return act


NAMES: Final = frozenset(
    {
        "submit.before_commit",
        "submit.committed",
        "claim.before_commit",
        "claim.committed",
        "heartbeat.before_commit",
        "complete.before_commit",
        "complete.committed",
        "pack.written",
        "receipt.before_commit",
        "export.before_commit",
        "export_staging.before_commit",
        "rerun.before_commit",
        "rerun_copies.before_commit",
        "bulk_operation.before_commit",
        "wake.before_commit",
        "release.before_commit",
        "events.before_commit",
        "publish.before_commit",
        "reap.before_commit",
        "retry.before_commit",
        "relay.taken",
        "relay.sent",
        "fold.before_commit",
        "reconcile.before_commit",
        "route.before_commit",
        "scopes.before_commit",
        "retention.before_commit",
        "delete.before_commit",
        "deletion.before_commit",
        "deletion.dropped",
        "invalidate.before_commit",
        "cancel.before_commit",
        "redrive.before_commit",
        "registry.before_commit",
        "snapshot.written",
        "service_key.before_commit",
        "rotate.before_commit",
        "deploy.before_commit",
        "dag_control.before_commit",
        "job_wakes.before_commit",
        "cutover.before_commit",
        "retirement.before_commit",
        "receive.before_commit",
        "receive.committed",
        "settle.before_commit",
        "pressure.before_commit",
        "trigger.before_commit",
        "triggers.before_commit",
        "sources.before_commit",
        "schedule.before_commit",
        "files.before_commit",
        "credentials.before_commit",
        "sink.received",
        "sink.before_data_commit",
        "sink.data_committed",
        "sink.before_state_commit",
        "sink.state_committed",
        "sink.before_refusal_commit",
        "sink.before_handover_commit",
        "ingest.received",
        "ingest.before_shard_commit",
        "ingest.shard_created",
        "ingest.chunk_loaded",
        "ingest.loaded",
        "ingest.before_loaded_commit",
        "ingest.finished",
        "ingest.before_total_commit",
        "ingest.counted",
        "ingest.before_enqueue_commit",
        "ingest.enqueued",
        "ingest.before_latch_commit",
        "ingest.latched",
        "ingest.before_small_commit",
        "ingest.before_hand_out_commit",
        "ingest.before_end_commit",
        "ingest.failed",
        "upload_sweep.before_forgotten",
        "buffer_redrive.before_commit",
        "buffer_sweep.taken",
        "buffer_sweep.before_forgotten",
        "object.before_visible",
        "object.visible",
        "sweep.before_commit",
        "sweep.before_forgotten",
        "bundle.stored",
        "bundle.before_commit",
        "command.before_commit",
        "slow.before_commit",
        "audit.before_commit",
        "webhook.before_sent",
        "webhook.sent",
        "query.before_commit",
        "batch_query.before_commit",
        "alert_mail.sent",
        "monitor.before_commit",
        "replay.selected",
        "replay.sent",
        "archive.written",
        "archive.before_commit",
        "telemetry.before_commit",
        "telemetry_age_out.before_commit",
        "worker.received",
        "worker.claimed",
        "worker.before_complete",
        "worker.before_logs",
    }
)
