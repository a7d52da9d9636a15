"""Rules for workers that hold tasks: heartbeat, report, release, emit events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import rule
from msgspec import Raw

from interlock.access.tokens import write_prefix
from interlock.apps.app import App
from interlock.wire.attempts import (
    BufferPublish,
    BufferPublished,
    Completion,
    CompletionGroup,
    Event,
    EventBatch,
    EventsAccepted,
    Heartbeat,
    Output,
    Release,
)
from tests.model.claim_rules import Claiming
from tests.model.dispatchers import Crashed
from tests.model.model_types import DATASET, VERSION, Hold, Report, Verdict
from tests.model.rule_base import Refused, ages, dispatchers, picks, seldom, several

# All of one stream. A rewritten range must end at or before its cursor.
event_scopes = st.sampled_from([("c:1",), ("c:2",), ("c:7",), ("c:5", "p:1-5")])


@dataclass(frozen=True)
class End:
    """The end of an attempt, independent of its holder."""

    status: str
    error_class: str | None = None
    events: tuple[str, ...] = ()
    outputs: int = 0

    def of(self, hold: Hold) -> Report:
        if self.status != "Completed":
            return Report(hold, self.status, error_class=self.error_class)
        return Report(hold, self.status, result=f'{{"of": {hold.attempt}}}', events=self.events, outputs=self.outputs)


COMPLETED = End("Completed")

ends = st.builds(
    End,
    st.sampled_from(["Completed", "Completed", "Completed", "Failed", "Failed", "Canceled"]),
    error_class=st.sampled_from(["Flaky", "Fatal", None]),
    events=st.one_of(st.just(()), event_scopes),
    outputs=st.integers(0, 2),
)


def fence(hold: Hold) -> dict[str, Any]:
    return {"task_id": hold.task_id, "attempt": hold.attempt, "lease_token": hold.lease_token}


class Workers(Claiming):
    # Heartbeat

    @rule(
        at=dispatchers,
        numbers=several,
        age=ages,
        progress=st.sampled_from([None, 0.25, 0.5]),
        fresh=seldom,
        crash=seldom,
    )
    def heartbeat(
        self, at: int, numbers: list[int], age: str, progress: float | None, fresh: bool, crash: bool
    ) -> None:
        holds = self.some_holds(numbers, age)
        if not holds:
            return None
        beats = [Heartbeat(progress=progress, token=fresh, **fence(hold)) for hold in holds]
        try:
            reply = self.call(
                at,
                lambda kernel: kernel.tasks.attempts.heartbeat(beats),
                crash="heartbeat.before_commit" if crash else None,
            )
        except Crashed:
            return self.look(f"heartbeat of {self.named(holds)}, lost")
        counted = first_of_each(holds)
        verdicts = [self.model.heartbeat(hold, progress) for hold in counted]
        refused = {(r.task_id, r.code, r.stale) for r in reply.refused}
        assert refused == _refusals(counted, verdicts)
        good = {v.task.task_id: v.task for v in verdicts if v.task and not v.refused}
        actual = {item.task_id: (item.lease_expires_at, item.cancel_requested) for item in reply.items}
        assert actual == {i: (task.lease_expires_at, task.cancel_requested) for i, task in good.items()}
        for item in reply.items:
            assert (item.capability_token is not None) == fresh
            if item.capability_token:
                self.check_new_token(item.capability_token)
        return self.look(f"heartbeat of {self.named(holds)}")

    # Report

    @rule(
        at=dispatchers,
        pick=picks,
        age=ages,
        end=ends,
        again=seldom,
        crash=st.sampled_from([None, None, None, "complete.before_commit", "complete.committed", "wake.before_commit"]),
    )
    def report_one(self, at: int, pick: int, age: str, end: End, again: bool, crash: str | None) -> None:
        for report in [end.of(hold) for hold in self.some_holds([pick], age)]:
            self.complete(at, [report], form="one", crash=crash)
            if again:
                self.complete(1 - at, [report], form="one")

    @rule(at=dispatchers, numbers=several, age=ages, how=st.lists(ends, min_size=4, max_size=4))
    def report_a_batch(self, at: int, numbers: list[int], age: str, how: list[End]) -> None:
        holds = self.some_holds(numbers, age)
        if holds:
            self.complete(at, [end.of(hold) for hold, end in zip(holds, how, strict=False)])

    @rule(at=dispatchers, numbers=several, age=ages)
    def report_by_index(self, at: int, numbers: list[int], age: str) -> None:
        """Reports by lease and index: the short form for completed tasks of runs."""
        holds = first_of_each(self.some_holds(numbers, age))
        of_runs = [hold for hold in holds if (task := self.model.find(hold.task_id)) and task.run]
        if of_runs:
            self.complete(at, [COMPLETED.of(hold) for hold in of_runs], form="groups")

    def complete(self, at: int, reports: Sequence[Report], *, form: str = "list", crash: str | None = None) -> None:
        """Reports a single task, a list, or groups of tasks that completed under one lease."""
        groups = self._groups(reports) if form == "groups" else []

        def work(kernel: App) -> Any:
            items = [_completion(report, kernel.settings.objects_root) for report in reports]
            if form == "one":
                return kernel.tasks.attempts.complete_one(items[0])
            return kernel.tasks.attempts.complete([], groups) if groups else kernel.tasks.attempts.complete(items)

        try:
            reply = self.ask(at, work, crash=crash)
        except Crashed:
            reply = None
        counted = first_of_each(reports)
        if reply is not None or crash != "complete.before_commit":
            before = self.model.with_slots()
            verdicts = [self.model.report(report) for report in counted]
            # A process that dies after the commit wakes no task: the reconciler finds the tasks that could have been
            # woken.
            if reply is not None:
                self.model.wake_after(before)
                self._compare_reports(counted, verdicts, reply, one=form == "one")
        what = ", ".join(f"{self.name_of(r.hold)} {r.status} {r.error_class or ''}" for r in reports)
        self.look(f"report {what} {form} {crash or ''}: {reply}")

    def _groups(self, reports: Sequence[Report]) -> list[CompletionGroup]:
        by_lease: defaultdict[tuple[UUID, int, UUID], list[tuple[int, Raw]]] = defaultdict(list)
        for report in reports:
            task = self.model.find(report.hold.task_id)
            assert task is not None
            assert task.run is not None
            lease = task.run.run_id, report.hold.attempt, report.hold.lease_token
            by_lease[lease].append((task.index or 0, Raw((report.result or "").encode())))
        return [
            CompletionGroup(
                run_id=run_id,
                attempt=attempt,
                lease_token=lease,
                indexes=[index for index, _ in done],
                results=[result for _, result in done],
            )
            for (run_id, attempt, lease), done in by_lease.items()
        ]

    def _compare_reports(
        self, reports: Sequence[Report], verdicts: Sequence[Verdict], reply: Any, *, one: bool
    ) -> None:
        refused = _refusals([r.hold for r in reports], verdicts)
        if not one:
            actual = {(r.task_id, r.code, r.stale) for r in reply.refused}
            assert actual == refused, f"refused {actual}, not {refused}"
            assert reply.accepted == len(reports) - len(refused)
        elif refused:
            assert isinstance(reply, Refused), f"accepted {reply}, not refused {refused}"
            alone = {(reports[0].hold.task_id, reply.code, reply.stale)}
            assert alone == refused, f"refused {alone}, not {refused}"
        else:
            assert not isinstance(reply, Refused), f"refused: {reply}"
            assert (reply.status, reply.duplicate) == (verdicts[0].status, verdicts[0].repeated)
            task = verdicts[0].task
            assert verdicts[0].repeated or reply.retry_at == (task and task.retry_at)

    # Release

    @rule(
        at=dispatchers,
        numbers=several,
        age=ages,
        again=seldom,
        crash=st.sampled_from([None, None, None, "release.before_commit", "wake.before_commit"]),
    )
    def give_back(self, at: int, numbers: list[int], age: str, again: bool, crash: str | None) -> None:
        holds = self.some_holds(numbers, age)
        for dispatcher in (at, 1 - at)[: 1 + again] if holds else ():
            self.release(dispatcher, holds, crash=crash)

    def release(self, at: int, holds: Sequence[Hold], *, crash: str | None = None) -> None:
        items = [Release(**fence(hold)) for hold in holds]
        counted = first_of_each(holds)
        try:
            count = self.call(at, lambda kernel: kernel.tasks.attempts.release(items), crash=crash)
        except Crashed:
            if crash == "wake.before_commit":
                for hold in counted:
                    self.model.release(hold)
            return self.look(f"give back {self.named(holds)}, crashed at {crash}")
        before = self.model.with_slots()
        assert sum(self.model.release(hold) for hold in counted) == count
        self.model.wake_after(before)
        return self.look(f"give back {self.named(holds)}: {count}")

    # Events

    @rule(at=dispatchers, pick=picks, age=ages, said=event_scopes, batch=st.sampled_from([None, "one", "two"]))
    def say_what_changed(self, at: int, pick: int, age: str, said: tuple[str, ...], batch: str | None) -> None:
        """Emits events of a running attempt, or publishes a batch of rows."""
        for hold in self.some_holds([pick], age):
            self._emit_or_publish(at, hold, said, batch)

    def _emit_or_publish(self, at: int, hold: Hold, scopes: tuple[str, ...], batch: str | None) -> None:
        task = self.model.find(hold.task_id)
        answer = self._publish(at, hold, batch) if batch else self._emit(at, hold, scopes)
        if task is not None and task.held_by(hold) and not task.job.definition.outputs:
            assert answer == Refused("dataset_not_granted")
        elif batch:
            fresh = self.model.publish(hold, batch)
            assert (not answer.duplicate if isinstance(answer, BufferPublished) else answer) == fresh
        else:
            new = self.model.emit(hold, scopes)
            assert answer == (None if new is None else EventsAccepted(accepted=new, duplicates=len(scopes) - new))
        self.look(f"{batch or scopes} of {self.name_of(hold)}: {answer}")

    def _emit(self, at: int, hold: Hold, scopes: tuple[str, ...]) -> Any:
        batch = EventBatch(events=[_event(scope) for scope in scopes], **fence(hold))
        return self.ask(at, lambda kernel: kernel.tasks.effects.emit(batch))

    def _publish(self, at: int, hold: Hold, batch: str) -> Any:
        root = self.world.dispatchers[at].settings.objects_root
        uri = f"{root}/buffers/{DATASET}/{hold.task_id}/{hold.attempt}/{batch}"
        publish = BufferPublish(
            batch_uri=uri, record_count=1, dataset_uuid=DATASET, dataset_version=VERSION, **fence(hold)
        )
        return self.ask(at, lambda kernel: kernel.tasks.effects.publish(publish))


def first_of_each(items: Sequence[Any]) -> list[Any]:
    """Keeps the first item of each task."""
    unique: dict[UUID, Any] = {}
    for item in items:
        unique.setdefault((item.hold if isinstance(item, Report) else item).task_id, item)
    return list(unique.values())


def _refusals(holds: Sequence[Hold], verdicts: Sequence[Verdict]) -> set[tuple[UUID, str, str | None]]:
    answered = zip(holds, verdicts, strict=True)
    return {(hold.task_id, verdict.refused, verdict.stale) for hold, verdict in answered if verdict.refused}


def _event(scope: str) -> Event:
    kind, _, value = scope.partition(":")
    if kind == "c":
        return Event(dataset_uuid=DATASET, dataset_version=VERSION, cursor=int(value))
    start, _, end = value.partition("-")
    return Event(dataset_uuid=DATASET, dataset_version=VERSION, partition_key=value, start=int(start), end=int(end))


def _completion(report: Report, root: str) -> Completion:
    prefix = write_prefix(root, report.hold.task_id, report.hold.attempt, DATASET, VERSION)
    outputs = [
        Output(output_index=n, dataset_uuid=DATASET, dataset_version=VERSION, location=f"{prefix}part")
        for n in range(report.outputs)
    ]
    more: dict[str, Any] = {"result": Raw(report.result.encode())} if report.result is not None else {}
    return Completion(
        status=report.status,  # type: ignore[arg-type]
        error_class=report.error_class,
        events=[_event(scope) for scope in report.events],
        outputs=outputs,
        **more,
        **fence(report.hold),
    )
