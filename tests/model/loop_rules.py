"""Rules for background activity: time passes, the loops of either dispatcher run, keys are rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import jwt
from hypothesis import strategies as st
from hypothesis.stateful import rule

from interlock.access.tokens import Claims
from tests.model.dispatchers import Crashed
from tests.model.model_types import Task
from tests.model.queue_rules import Messages
from tests.model.rule_base import Refused, chosen, dispatchers, picks
from tests.model.submission_rules import Doors
from tests.model.table_checks import UNTOLD
from tests.model.worker_rules import End, ends

_LOOPS = {
    "relay": ("relay.taken", "relay.sent"),
    "retries": ("retry.before_commit",),
    "reaper": ("reap.before_commit", "wake.before_commit"),
    "run-counters": ("fold.before_commit",),
    "run-cancels": (),
    "reconciler": ("reconcile.before_commit",),
    "retention": ("retention.before_commit",),
}
"""Each loop with the failpoints at which a pass may die."""

_SPANS = {"a second": 1, "ten seconds": 10, "a minute": 61, "an hour": 3600, "three days": 3 * 86_400}
_MOMENTS = ("to the next expiry", "past the leases", "past the timeouts", "to the next retry")

_GRACE = timedelta(seconds=60)
"""The reconciler skips younger tasks."""

_OWED = (
    "select kind, coalesce((body ->> 'task_id')::uuid,"
    " interlock.run_task_id((body ->> 'run_id')::uuid, (body ->> 'start')::bigint)) as task_id"
    " from interlock.outbox where due_at <= $1 and kind <> 'route'"
)


class Loops(Doors, Messages):
    # Time

    @rule(jump=st.one_of(st.sampled_from(list(_SPANS)), st.sampled_from(_MOMENTS)))
    def time_passes(self, jump: str) -> None:
        if jump in _SPANS:
            self.clock.advance(_SPANS[jump])
        else:
            self._until(jump)

    def _until(self, jump: str) -> None:
        tasks = self.model.tasks
        running = [task for task in tasks if task.status == "Running"]
        moments: dict[str, Sequence[datetime | None]] = {
            "to the next expiry": sorted(task.lease_expires_at for task in running if task.lease_expires_at)[:1],
            "past the leases": [task.lease_expires_at for task in running],
            "past the timeouts": [task.timeout_at for task in running],
            "to the next retry": sorted(task.retry_at for task in tasks if task.retry_at)[:1],
        }
        moment = max((moment for moment in moments[jump] if moment), default=self.model.now)
        self.clock.advance(max(0.0, (moment - self.model.now).total_seconds()))

    @rule(at=dispatchers, then=st.sampled_from(["nothing", "retry", "retry"]))
    def workers_fall_silent(self, at: int, then: str) -> None:
        """Expires and reaps every lease; the next attempt may be queued before the worker reports."""
        self._until("past the leases")
        self.run_loop(at, "reaper")
        if then == "retry":
            self._until("to the next retry")
            self.run_loop(1 - at, "retries")

    @rule(at=dispatchers, pick=picks, end=ends, then=st.sampled_from(["nothing", "retry"]))
    def report_late(self, at: int, pick: int, end: End, then: str) -> None:
        if not self.late_holds() and self.some_holds([pick], "live"):
            self.workers_fall_silent(at, then)
        for hold in self.some_holds([pick], "late"):
            self.complete(at, [end.of(hold)], form="one")

    # Loops

    @rule(at=dispatchers, name=st.sampled_from(list(_LOOPS)), crash=st.integers(0, 5))
    def a_loop_runs(self, at: int, name: str, crash: int) -> None:
        places = _LOOPS[name]
        self.run_loop(at, name, crash=places[crash] if crash < len(places) else None)

    def run_loop(self, at: int, name: str, *, crash: str | None = None) -> None:
        special = {"reconciler": self.reconcile, "relay": self.relay, "retention": self.delete_what_is_past_its_time}
        passes: dict[str, Callable[[], int]] = {
            "reaper": self.model.reap,
            "retries": self.model.requeue_due,
            "run-counters": self.model.fold,
            "run-cancels": self.model.cancel_runs,
        }
        if name in special:
            special[name](at, crash)
        else:
            self._pass(at, name, passes[name], crash=crash)

    def _pass(self, at: int, name: str, expected: Callable[[], int], *, crash: str | None = None) -> int:
        try:
            done = self.call(at, lambda _: self.world.service(at, name).run_once(), crash=crash)
        except Crashed:
            if crash == "wake.before_commit":
                expected()
                self.model.woken.clear()
            self.look(f"{name}, crashed at {crash}")
            return 0
        due = expected()
        assert done == due, f"{name} did {done}, not {due}"
        self.look(f"{name}: {done}")
        return done

    def reconcile(self, at: int, crash: str | None = None) -> None:
        untold = {row["task_id"] for row in self.world.select(UNTOLD, list(self.lost))}
        found = [task for task in self.model.tasks if task.task_id in untold and self._is_found(task)]
        self._pass(at, "reconciler", lambda: self._reconciled(found), crash=crash)
        assert crash or not self.lost & {task.task_id for task in found}

    def _is_found(self, task: Task) -> bool:
        alive = task.run is None or task.run.ended_at is None
        return task.status == "Queued" and not task.parked and task.queued_at < self.model.now - _GRACE and alive

    def _reconciled(self, found: list[Task]) -> int:
        self.lost -= {task.task_id for task in found}
        stranded = [task.job for task in self.model.tasks if task.parked]
        self.model.wake(job for job in self.model.jobs if job in stranded)
        return len(found) + sum(ranks.total() for ranks in self.model.woken.values() if ranks)

    def relay(self, at: int, crash: str | None = None) -> None:
        owed = self.world.select(_OWED, self.model.now)
        invoked = [self.model.find(row["task_id"]) for row in owed if row["kind"] == "invoke"]
        try:
            done = self.call(at, lambda _: self.world.service(at, "relay").run_once(), crash=crash)
            assert done == len(owed)
        except Crashed:
            # The outbox row is still there, whether or not it was sent: it is sent again later.
            done = 0
        self.call(at, lambda kernel: kernel.tasks.inline.drain(5))
        for task in invoked:
            if task is not None and crash != "relay.taken":
                self.model.run_inline(task)
        self.look(f"relay: {done} of {len(owed)}, running {[task for task in invoked if task and task.inline]}")

    def delete_what_is_past_its_time(self, at: int, crash: str | None = None) -> None:
        age = timedelta(days=self.world.dispatchers[at].settings.retention_days)
        runs = self.model.expired_runs(age)
        keys = self.world.select("select 1 from interlock.signing_keys where verify_until <= $1", self.model.now)
        own = {row["run_id"] for row in self.world.select("select run_id from interlock.runs where shard <> 0")}
        old = "select 1 from interlock.minute_counts where minute < $1"
        minutes = self.world.select(old, self.model.now - timedelta(days=1))
        requests = [key for key, past in self.remembered.items() if past.until <= self.model.now]
        try:
            done = self.call(at, lambda _: self.world.service(at, "retention").run_once(), crash=crash)
        except Crashed:
            return self.look("retention, crashed")
        self.call(at, lambda _: self.world.service(at, "run-deletions").run_once())
        left = {row["run_id"] for row in self.world.select("select run_id from interlock.runs")}
        gone = [run for run in runs if run.run_id not in left]
        assert len(gone) == min(1, len(runs))
        swept = sum(1 if run.run_id in own else len(run.tasks_in(self.model.tasks)) + 1 for run in gone)
        assert done == swept + len(keys) + len(requests) + len(minutes)
        for key in requests:
            del self.remembered[key]
        for run in gone:
            self.model.forget(run)
        return self.look(f"retention: {done}")

    # Keys

    @rule(at=dispatchers, pick=picks, what=st.sampled_from(["rotate", "verify"]))
    def keys_and_tokens(self, at: int, pick: int, what: str) -> None:
        if what == "verify" and any(hold.token for hold in self.holds):
            self._verify(at, pick)
        else:
            self._rotate(at)

    def _rotate(self, at: int) -> None:
        new = self.call(at, lambda kernel: kernel.access.keyring.rotate())
        good = self.world.select(
            "select kid from interlock.signing_keys where retired_at is null or verify_until > $1", self.model.now
        )
        for dispatcher in (0, 1):
            shown = {key["kid"] for key in self.call(dispatcher, lambda kernel: kernel.access.keyring.jwks())}
            assert shown == {row["kid"] for row in good}
            assert new.kid in shown

    def _verify(self, at: int, pick: int) -> None:
        """Checks that tokens stay valid after a rotation until they expire, and not longer."""
        hold = chosen([hold for hold in self.holds if hold.token], pick)
        token = hold.token or ""
        answer = self.ask(at, lambda kernel: kernel.access.tokens.verify(token))
        expires = jwt.decode(token, options={"verify_signature": False})["exp"]
        if expires <= self.model.now.timestamp():
            assert answer in (Refused("token_expired"), Refused("bad_token"))
        else:
            assert isinstance(answer, Claims), f"refused: {answer}"
            assert (answer.task_id, answer.attempt) == (hold.task_id, hold.attempt)
