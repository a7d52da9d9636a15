"""Rules for the queue: wake-ups that are received, claimed, acked, redelivered, dead-lettered or lost."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import rule

from interlock.tasks.queue import Handle, Queue
from interlock.wire.attempts import ClaimBatchReply
from tests.model.claim_rules import crashes
from tests.model.dispatchers import MAX_RECEIVES, Crashed
from tests.model.model_types import Task
from tests.model.rule_base import Letter, Wakeup, chosen, dispatchers, picks, seldom
from tests.model.worker_rules import Workers

_QUEUE = "platform"
_ALL = 100

_READY = """
    select message_id::text, receives >= $3 as dies from interlock.queue_messages
    where queue = $1 and dead_at is null and visible_at <= $2"""


class Messages(Workers):
    @rule(
        at=dispatchers,
        visibility=st.sampled_from([1.0, 30.0]),
        crash=st.sampled_from([None, None, None, None, "receive.before_commit", "receive.committed"]),
    )
    def receive(self, at: int, visibility: float, crash: str | None) -> None:
        self.receive_all(at, visibility, crash=crash)

    def receive_all(self, at: int, visibility: float, *, crash: str | None = None) -> list[Letter]:
        ready = self.world.select(_READY, _QUEUE, self.model.now, MAX_RECEIVES)
        dying = [row["message_id"] for row in ready if row["dies"]]
        self.lost |= {task.task_id for message_id in dying for task in self._named_by(message_id)}
        try:
            received = self.call(
                at,
                lambda kernel: kernel.tasks.queue.receive(
                    _QUEUE, wait_seconds=0, limit=_ALL, visibility_seconds=visibility
                ),
                crash=crash,
            )
        except Crashed:
            self.look(f"receive, crashed at {crash}")
            return []
        assert {m.message_id for m in received} == {row["message_id"] for row in ready} - set(dying)
        letters = [Letter(_QUEUE, m.message_id, m.receipt, msgspec.json.decode(m.body, type=Wakeup)) for m in received]
        letters.sort(key=self._first_number)
        self.letters += letters
        self.look(f"receive {[self._tasks_of(letter.wakeup) for letter in letters]}")
        return letters

    @rule(at=dispatchers, pick=picks, limit=st.integers(1, 4), newest=st.booleans(), crash=crashes)
    def claim_what_a_message_names(self, at: int, pick: int, limit: int, newest: bool, crash: str | None) -> None:
        """Claims with the receipt of a delivery, which a later delivery may have invalidated."""
        if not self.letters:
            self.receive_all(at, 30.0)
        if self.letters:
            self.claim_letter(at, chosen(self.letters[-3:] if newest else self.letters, pick), limit, crash=crash)

    def claim_letter(self, at: int, letter: Letter, limit: int, *, crash: str | None = None) -> None:
        wakeup = letter.wakeup
        run = next((run for run in self.model.runs if run.run_id == wakeup.run_id), None)
        if wakeup.task_id is not None:
            self.claim_ids(at, [wakeup.task_id], one=True, crash=crash, letter=letter)
        elif run is not None:
            self.claim_range(at, run, wakeup.start, wakeup.end, limit, crash=crash, letter=letter)
        else:
            self._claim_nothing(at, letter)

    def _claim_nothing(self, at: int, letter: Letter) -> None:
        """Claims with a message whose run retention has deleted; the message is deleted too."""
        wakeup = letter.wakeup
        _, reply = self._claim(at, {"run_id": wakeup.run_id, "start": wakeup.start, "end": wakeup.end}, letter=letter)
        assert reply == ClaimBatchReply(claims=[])
        assert not self.is_current(letter)
        self.look("claim of a run that is gone")

    @rule(at=dispatchers, pick=picks, how=st.sampled_from(["ack", "nack", "extend", "lose", "revive"]), crash=seldom)
    def meddle_with_messages(self, at: int, pick: int, how: str, crash: bool) -> None:
        if how == "revive":
            self.revive_dead_messages(at)
        elif how == "lose" or not self.letters:
            self._lose(pick)
        else:
            self._settle(at, chosen(self.letters, pick), how, crash="settle.before_commit" if crash else None)

    def _settle(self, at: int, letter: Letter, how: str, *, crash: str | None) -> None:
        current = self.is_current(letter)
        if current and how == "ack":
            # A worker that acks without a claim loses the wake-up.
            self.lost |= {task.task_id for task in self._named_by(letter.message_id)}
        handles = [Handle(letter.message_id, letter.receipt)]
        try:
            count = self.call(at, lambda kernel: _settling(kernel.tasks.queue, how, handles), crash=crash)
        except Crashed:
            return self.look(f"{how}, lost")
        assert count == current
        return self.look(f"{how} of {self._tasks_of(letter.wakeup)}: {count}")

    def _lose(self, pick: int) -> None:
        rows = self.world.select("select message_id::text from interlock.queue_messages where queue = $1", _QUEUE)
        named = [(self._named_by(row["message_id"]), row["message_id"]) for row in rows]
        if named:
            tasks, message_id = chosen(sorted(named, key=lambda pair: [task.number for task in pair[0]]), pick)
            self.lost |= {task.task_id for task in tasks}
            self.world.select("delete from interlock.queue_messages where message_id = $1", int(message_id))
            self.look(f"lose the message of {tasks}")

    def revive_dead_messages(self, at: int) -> None:
        dead = self.world.select(
            "select 1 from interlock.queue_messages where queue = $1 and dead_at is not null", _QUEUE
        )
        count = self.call(at, lambda kernel: kernel.tasks.queue.redrive(_QUEUE, _ALL))
        assert count == len(dead)
        self.look(f"revive {count} dead messages")

    def _named_by(self, message_id: str) -> list[Task]:
        (row,) = self.world.select("select body from interlock.queue_messages where message_id = $1", int(message_id))
        return self._tasks_of(msgspec.json.decode(row["body"], type=Wakeup))

    def _tasks_of(self, wakeup: Wakeup) -> list[Task]:
        if wakeup.task_id is not None:
            return [task for task in self.model.tasks if task.task_id == wakeup.task_id]
        mine = [task for task in self.model.tasks if task.run and task.run.run_id == wakeup.run_id]
        return [task for task in mine if wakeup.start <= (task.index or 0) <= wakeup.end]

    def _first_number(self, letter: Letter) -> tuple[bool, int]:
        tasks = self._tasks_of(letter.wakeup)
        return letter.wakeup.task_id is None, tasks[0].number if tasks else 0


async def _settling(queue: Queue, how: str, handles: list[Handle]) -> Any:
    if how == "ack":
        return await queue.ack(_QUEUE, handles)
    if how == "nack":
        return await queue.nack(_QUEUE, handles, 0)
    return await queue.extend(_QUEUE, handles, 30)
